"""The audit log: a line of JSON for each call of an operator, answered or refused. It never has prompts or secrets.

Operators' calls are those that need the scope `admin`, by the guard's table. The log is a layer around the guard, which
knows nothing of it; without one, calls pass no further code. Each line is written when its call ends, with the file
opened for it: a file that was moved away is made anew, without a signal, and gateways of one host may share it. Lines
about callers that are not admitted are bounded, so that strangers cannot fill a disk.
"""

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from sluice_server.services.gateway.access.identity import CALLER, Identity
from sluice_server.services.gateway.access.metadata import Context, read_trace
from sluice_server.services.gateway.calls.guard import ADMIN, KINDS, SCOPES, Handler
from sluice_server.services.gateway.contract.status import CODES, DETAILS_KEY
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.telemetry.logs import about_trace

logger = logging.getLogger(__name__)

SHOWN = frozenset(  # fields of requests; a setting of a model may be a secret, so `settings` is none of them
    {
        *("model", "revision", "expected_revision", "source", "adapters", "pinned", "grace", "level"),
        *("alias", "targets", "adapter", "path", "base_model", "expected_digest", "start_sequence_number"),
        *("process", "tokens", "host_bytes", "tenant", "everyone", "kind", "duration", "steps", "max_bytes"),
        *("timeout_s", "output_dir", "start_step", "num_steps", "activities", "with_stack", "record_shapes"),
        *("profile_by_stage",),
    }
)
MAX_CHARS = 1024  # of the fields of a request
STRANGERS_PER_S = 10  # lines about callers that are not admitted
NOBODY = Identity("", frozenset())
NOT_ADMITTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def audited(
    guard: grpc.aio.ServerInterceptor, settings: GatewaySettings, clock: Callable[[], float]
) -> grpc.aio.ServerInterceptor:
    """Returns the guard, within the audit log if the settings have one."""
    if not settings.audit_log:
        return guard
    return Audited(guard, AuditLog(settings.audit_log, settings.gateway_id, clock))


class AuditLog:
    """Writes the lines of one gateway to a file that is only appended to.

    Attributes:
        num_left_out: calls of strangers without a line since the last line, which says their number.
    """

    def __init__(self, path: str, process_id: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._process_id = process_id
        self._clock = clock
        self._since_s = clock()
        self._num_strangers = 0  # lines about them since then
        self.num_left_out = 0

    async def record(self, method: str, request: object, context: Context, answering: Awaitable[object]) -> object:
        """Awaits the answer of a call, and writes its line, however it ends."""
        start_s = self._clock()
        code: grpc.StatusCode = grpc.StatusCode.CANCELLED
        try:
            answer = await answering
            code = _code(context)
            return answer
        finally:
            self._write(method, request, context, code, self._clock() - start_s)

    def _write(self, method: str, request: object, context: Context, code: grpc.StatusCode, took_s: float) -> None:
        if code in NOT_ADMITTED and self._is_full():
            self.num_left_out += 1
            return
        trace = read_trace(context)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "process": self._process_id,
            "method": method.removeprefix("/"),
            "tenant": CALLER.get(NOBODY).tenant,
            "peer": context.peer(),
            "trace_id": trace[3:35],
            "request": fields_of(request),
            "code": code.name,
            "reason": _reason(context),
            "duration_s": round(took_s, 4),
        }
        if self.num_left_out:
            line["left_out"] = self.num_left_out
        try:
            append(self._path, json.dumps(line).encode() + b"\n")
        except OSError as error:
            about = about_trace(trace, method=method)
            logger.error("%s gets no line about this call: %s", self._path, error.strerror, extra=about)
        else:
            self.num_left_out = 0

    def _is_full(self) -> bool:
        """Whether this second has had its lines about strangers; counts one more."""
        if self._clock() - self._since_s >= 1.0:
            self._since_s, self._num_strangers = self._clock(), 0
        self._num_strangers += 1
        return self._num_strangers > STRANGERS_PER_S


class Audited(grpc.aio.ServerInterceptor):
    """A guard, and the lines about what it lets pass and refuses."""

    def __init__(self, guard: grpc.aio.ServerInterceptor, log: AuditLog) -> None:
        self._guard = guard
        self._log = log
        self._audited: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the guard's handler, which is followed by a line if it is an operator's."""
        method = handler_call_details.method
        if SCOPES.get(method, ADMIN) != ADMIN:
            return await self._guard.intercept_service(continuation, handler_call_details)
        if method not in self._audited:
            handler = await self._guard.intercept_service(continuation, handler_call_details)
            if handler is None:
                return None
            self._audited[method] = self._behind_log(method, handler)
        return self._audited[method]

    def _behind_log(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> Handler:
        unary, stream = (handler.unary_unary, handler.unary_stream), (handler.stream_unary, handler.stream_stream)
        kinds: tuple[Any, ...] = unary + stream
        run = next(one for one in kinds if one is not None)

        async def audited(request: object, context: Context) -> object:
            return await self._log.record(method, request, context, run(request, context))

        make = KINDS[(bool(handler.request_streaming), bool(handler.response_streaming))]
        return make(audited, handler.request_deserializer, handler.response_serializer)


def append(path: str, line: bytes) -> None:
    """Appends to the file, which only its owner can read if it is made now. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def fields_of(request: object) -> object:
    """Returns the fields of a request that may be shown, as plain values; as cut text if they are too long, and nothing
    of what could not be parsed."""
    if not isinstance(request, Message):
        return {}
    from google.protobuf.json_format import MessageToDict  # a gateway without an audit log does without

    named = MessageToDict(request, preserving_proto_field_name=True)
    shown = {name: value for name, value in named.items() if name in SHOWN}
    text = json.dumps(shown)
    return shown if len(text) <= MAX_CHARS else text[:MAX_CHARS]


def _code(context: Context) -> grpc.StatusCode:
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else CODES.get(code or 0, grpc.StatusCode.UNKNOWN)


def _reason(context: Context) -> str:
    """Returns the reason of the error with which the call was ended; "" if there is none."""
    for key, value in context.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status, info = status_pb2.Status.FromString(bytes(value)), error_details_pb2.ErrorInfo()  # type: ignore[arg-type] # -bin values are bytes
            return info.reason if status.details and status.details[0].Unpack(info) else ""
    return ""
