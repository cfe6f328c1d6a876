"""The handler of ControlService.Profile: has one process recorded, and streams the file."""

import contextlib
from collections.abc import Callable

from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.contract.durations import to_duration, to_seconds
from sluice_server.services.gateway.operations import CarriesOut
from sluice_server.services.messages.control import Chunk, Profile, ProfileKind, Progress, Recorded, Recording

MAX_S = 60.0
DURATION_S = 10.0  # where none is given
MAX_STEPS = 1000
MAX_TORCH_STEPS = 200  # each has thousands of events
TORCH_STEPS = 20  # where none are given
MIN_BYTES, MAX_BYTES = 1 << 10, 256 << 20
BYTES = 64 << 20  # where none are given
KINDS = {
    control_pb2.PROFILE_KIND_TORCH: ProfileKind.TORCH,
    control_pb2.PROFILE_KIND_STACKS: ProfileKind.STACKS,
    control_pb2.PROFILE_KIND_PYTHON_MEMORY: ProfileKind.PYTHON_MEMORY,
    control_pb2.PROFILE_KIND_CUDA_MEMORY: ProfileKind.CUDA_MEMORY,
}


class ProfileCalls:
    """The handler. `first_engine` returns the process that is recorded where a request names none."""

    def __init__(self, operations: CarriesOut, first_engine: Callable[[], str]) -> None:
        self._operations = operations
        self._first_engine = first_engine

    async def profile(self, request: control_pb2.ProfileRequest, context: Context) -> None:
        """Profile: records and writes the parts of the file."""
        try:
            work, process = work_of(request), request.process or self._first_engine()
            async with contextlib.aclosing(self._operations.carry_out(process, work, work.seconds)) as parts:
                async for part in parts:
                    await context.write(_response(part, process, request.kind))
        except ServiceError as error:
            await refuse(context, error)


def work_of(request: control_pb2.ProfileRequest) -> Profile:
    """Returns what a request asks for, with the defaults. Raises ServiceError."""
    kind = KINDS.get(request.kind)
    if kind is None:
        names = ", ".join(control_pb2.ProfileKind.Name(one) for one in KINDS)
        raise invalid("kind", f"{request.kind} is not one of {names}")
    seconds = to_seconds("duration", request.duration, MAX_S) if request.HasField("duration") else DURATION_S
    num_steps = TORCH_STEPS if kind is ProfileKind.TORCH else 0
    if request.HasField("steps"):
        num_steps = request.steps
        most = MAX_TORCH_STEPS if kind is ProfileKind.TORCH else MAX_STEPS
        if not 1 <= num_steps <= most:
            raise invalid("steps", f"{num_steps} is not in [1, {most}]", limit=most)
    max_bytes = request.max_bytes if request.HasField("max_bytes") else BYTES
    if not MIN_BYTES <= max_bytes <= MAX_BYTES:
        raise invalid("max_bytes", f"{max_bytes} is not in [{MIN_BYTES}, {MAX_BYTES}]", limit=MAX_BYTES)
    return Profile(kind, seconds, num_steps, max_bytes)


def _response(part: Progress, process: str, kind: "control_pb2.ProfileKind.ValueType") -> control_pb2.ProfileResponse:
    match part:
        case Recording():
            return control_pb2.ProfileResponse(started=control_pb2.ProfileStarted(process=process, kind=kind))
        case Chunk():
            return control_pb2.ProfileResponse(data=part.data)
        case Recorded():
            end = control_pb2.ProfileFinished(
                duration=to_duration(part.seconds), steps=part.num_steps, bytes=part.size, sha256=part.digest
            )
            return control_pb2.ProfileResponse(finished=end)
        case _:
            raise TypeError(f"a profile has no {type(part).__name__}")
