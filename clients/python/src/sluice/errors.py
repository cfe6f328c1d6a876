"""Errors of a call: one class for each gRPC code, filled from google.rpc details."""

import dataclasses
from collections.abc import Iterable, Mapping

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from sluice.v1 import inference_pb2, types_pb2

DETAILS_KEY = "grpc-status-details-bin"
TRACE_KEY = "x-sluice-trace-id"
GENERATION_KEY = "x-sluice-generation-id"
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request whose value is not allowed."""

    field: str
    description: str


class SluiceError(Exception):
    """A call or a generation failed.

    Attributes:
        code: the gRPC status code.
        reason: the reason in ErrorInfo, such as "QUEUE_FULL"; "" if the server sent none (its transport failed).
        message: what failed, the value, the limit, and what to do.
        metadata: the metadata in ErrorInfo.
        retry_after_s: seconds to wait before another attempt; None if the server named none.
        violations: the fields whose values are not allowed.
        generation_id: the generation that failed; "" when it had none.
        last_seq: sequence number of the last delta that the server sent; 0 without one.
        usage: tokens used before the failure; None if the generation had not begun.
        trace_id: id of the server's trace; "" without one.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, code: grpc.StatusCode | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = {}
        self.retry_after_s: float | None = None
        self.violations: tuple[Violation, ...] = ()
        self.generation_id = ""
        self.last_seq = 0
        self.usage: types_pb2.Usage | None = None
        self.trace_id = ""

    def __str__(self) -> str:
        return f"{self.code.name}{f' ({self.reason})' if self.reason else ''}: {self.message}"


class InvalidArgument(SluiceError):
    """A field is malformed or out of its range: see `violations`."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(SluiceError):
    """No such model or generation."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(SluiceError):
    """The idempotency key names a generation that is in flight."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(SluiceError):
    """The key or certificate is known, but not allowed to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(SluiceError):
    """No key, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ResourceExhausted(SluiceError):
    """A queue or cache is full, or the quota is used up: see `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(SluiceError):
    """The server's state does not allow it: another revision is served, or the request would never fit."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(SluiceError):
    """The stream was not read fast enough, or another call has taken its generation over."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(SluiceError):
    """The point to resume from is no longer kept."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(SluiceError):
    """A feature of the contract that the server does not have."""

    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(SluiceError):
    """An error inside the server."""

    code = grpc.StatusCode.INTERNAL


class Unavailable(SluiceError):
    """No server answers, or it is about to stop or not ready yet, and trying again did not help."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(SluiceError):
    """The deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(SluiceError):
    """The generation was cancelled."""

    code = grpc.StatusCode.CANCELLED


_KINDS: Mapping[grpc.StatusCode, type[SluiceError]] = {kind.code: kind for kind in SluiceError.__subclasses__()}


def from_rpc(error: grpc.RpcError) -> SluiceError:
    """Returns the error for an exception of grpc, blocking or asyncio."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return SluiceError(str(error))
    metadata = {key: value for key, value in error.trailing_metadata() or ()}
    packed = metadata.get(DETAILS_KEY)
    status = status_pb2.Status.FromString(packed) if isinstance(packed, bytes) else status_pb2.Status()
    found = _made(error.code(), error.details() or error.code().name.lower(), status.details)
    found.trace_id = str(metadata.get(TRACE_KEY, ""))
    found.generation_id = found.generation_id or str(metadata.get(GENERATION_KEY, ""))
    return found


def from_failed(failed: inference_pb2.Failed) -> SluiceError:
    """Returns the error in the last frame of a generation of Converse."""
    found = _made(_CODES.get(failed.code, grpc.StatusCode.UNKNOWN), failed.message, failed.details)
    found.generation_id = failed.generation_id
    found.last_seq = failed.last_seq
    if failed.HasField("usage"):
        found.usage = failed.usage
    return found


def _made(code: grpc.StatusCode, message: str, details: Iterable[AnyMessage]) -> SluiceError:
    error = _KINDS.get(code, SluiceError)(message, code=code)
    for packed in details:
        _take(error, packed)
    return error


def _take(error: SluiceError, packed: AnyMessage) -> None:
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    used = types_pb2.Usage()
    if packed.Unpack(info):
        error.reason, error.metadata = info.reason, dict(info.metadata)
        error.generation_id = info.metadata.get("generation_id", "")
        error.last_seq = int(info.metadata.get("last_seq", "0"))
    elif packed.Unpack(retry):
        error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    elif packed.Unpack(bad):
        error.violations = tuple(Violation(one.field, one.description) for one in bad.field_violations)
    elif packed.Unpack(used):
        error.usage = used
