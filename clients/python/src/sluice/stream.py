"""The blocking stream of one generation's deltas. Resumed when its connection breaks or its gateway ends."""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import grpc

from sluice import errors
from sluice.attempts import Attempts
from sluice.pool import Lease, Pool
from sluice.progress import Progress
from sluice.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

CANCEL_TIMEOUT_S = 10.0

_T = TypeVar("_T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]
_Streamed: TypeAlias = "grpc._CallIterator[inference_pb2.StreamGenerateResponse]"
_Resumed: TypeAlias = "grpc._CallIterator[inference_pb2.ResumeGenerateResponse]"
Call: TypeAlias = "_Streamed | _Resumed"


class Line:
    """A channel and its stubs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(channel)


class Stream:
    """Iterating yields the deltas, each once. Raises SluiceError on failure; leaving the loop cancels the generation.

    Attributes:
        progress: what was received so far: `accepted`, `prompt_info`, `ends` by output, `finished`.
    """

    def __init__(self, pool: Pool[Line], progress: Progress, attempts: Attempts, metadata: Metadata) -> None:
        self.progress = progress
        self._pool = pool
        self._attempts = attempts
        self._metadata = metadata
        self._call: Call | None = None
        self._avoid: Lease[Line] | None = None  # the line of the last attempt
        self._is_cancelled = False

    @property
    def num_broken(self) -> int:
        """How often the connection was lost and the generation resumed."""
        return self._attempts.num_broken

    def __iter__(self) -> Iterator[types_pb2.Delta]:
        while self.progress.finished is None:
            lease = self._avoid = self._pool.lease(self._avoid, stay=self.progress.stays)
            try:
                yield from self._read(lease.line)
                return
            except grpc.RpcError as error:
                if self.progress.finished is not None:
                    return
                pause_s = self._pause_s(errors.from_rpc(error), lease)
            finally:
                self._pool.release(lease)
            time.sleep(pause_s)

    def text(self) -> str:
        """Reads to the end and returns the rest of the first output's text."""
        return "".join(delta.text for delta in self if delta.output_index == 0)

    def cancel(self) -> None:
        """Cancels the generation, from any thread; its iterator raises Cancelled."""
        self._is_cancelled = True
        accepted = self.progress.accepted
        if self.progress.detaches and accepted is not None:
            cancel_generation(self._pool, accepted.generation_id, self._metadata)
        if self._call is not None:
            self._call.cancel()

    def after(self, error: errors.SluiceError, lease: Lease[Line], *, can_go_on: bool) -> None:
        """Takes over a generation whose call, on `lease`, ended with `error`. Raises `error` if it cannot resume."""
        self._avoid = lease
        if not can_go_on and not self.progress.detaches:
            raise error
        self.progress.spec.ClearField("credit_window")  # ResumeGenerate takes no grants
        time.sleep(self._pause_s(error, lease))

    def _read(self, line: Line) -> Iterator[types_pb2.Delta]:
        call = self._call = self._asked(line)
        deltas = self.progress.deltas
        try:
            for message in call:
                yield from deltas(message)
        finally:
            call.cancel()  # does nothing to a call that has ended
        if self.progress.finished is None:
            raise errors.InternalError("the server ended the stream before its last message")

    def _asked(self, line: Line) -> Call:
        left_s = self._attempts.left_s(time.monotonic())
        if not self.progress.has_begun:
            request = inference_pb2.StreamGenerateRequest(spec=self.progress.spec, joined_events=True)
            return line.inference.StreamGenerate(request, timeout=left_s, metadata=self._metadata)
        rest = inference_pb2.ResumeGenerateRequest(spec=self.progress.rest(), joined_events=True)
        return line.inference.ResumeGenerate(rest, timeout=left_s, metadata=self._metadata)

    def _pause_s(self, error: errors.SluiceError, lease: Lease[Line]) -> float:
        if self._is_cancelled:
            raise error
        elsewhere = self._pool.failed(lease.address, error) and not self.progress.stays
        return self._attempts.pause_s(error, time.monotonic(), random.random(), elsewhere=elsewhere)


def once(pool: Pool[Line], attempts: Attempts, ask: Callable[[Line, float | None], _T]) -> _T:
    """Makes a unary call and repeats it where that is safe. Raises SluiceError."""
    lease: Lease[Line] | None = None
    while True:
        lease = pool.lease(lease)
        try:
            return ask(lease.line, attempts.left_s(time.monotonic()))
        except grpc.RpcError as error:
            failed = errors.from_rpc(error)
            elsewhere = pool.failed(lease.address, failed)
            pause_s = attempts.pause_s(failed, time.monotonic(), random.random(), elsewhere=elsewhere)
        finally:
            pool.release(lease)
        time.sleep(pause_s)


def cancel_generation(pool: Pool[Line], generation_id: str, metadata: Metadata) -> None:
    """Cancels a generation by its id, at the address that has it; does nothing if it has ended. Raises SluiceError."""
    request = inference_pb2.CancelGenerationRequest(generation_id=generation_id)
    failed: errors.SluiceError | None = None
    for address in range(pool.num_targets):
        try:
            pool.line_of(address).inference.CancelGeneration(request, timeout=CANCEL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            found = errors.from_rpc(error)
            failed = failed if isinstance(found, errors.NotFound) else found
        else:
            return
    if failed is not None:
        raise failed
