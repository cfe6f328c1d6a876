"""Maps a gRPC status to OpenAI's error object and an HTTP status. The edge's only such mapping.

UNIMPLEMENTED becomes 400: OpenAI's clients retry every 5xx, and a missing feature does not appear by retrying.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sluice_server.services.edge.names import UNNAMED, FieldNames

_STATUS: Mapping[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.UNIMPLEMENTED: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (499, "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error"),
}
# grpc's own message would reveal internal addresses.
UNREACHABLE = "the server behind this address cannot be reached: try again shortly"
_BROKEN = (500, "server_error")


class EdgeError(Exception):
    """An error response.

    `param` and `code` are OpenAI's; `retry_after_s` is 0 if a retry is of no use; `allow` has the methods of the path.
    """

    def __init__(self, status: int, kind: str, message: str, *, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = 0.0
        self.allow = ""

    def body(self) -> dict[str, object]:
        """Returns OpenAI's error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param or None, "code": self.code or None}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Returns the headers retry-after, in whole seconds, and allow, where they are known."""
        retry = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        return {**retry, **({"allow": self.allow} if self.allow else {})}


def bad_request(param: str, message: str, code: str = "") -> EdgeError:
    """Returns the error for a request that the edge itself refuses."""
    return EdgeError(400, "invalid_request_error", f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, message: str) -> EdgeError:
    """Returns the error for a part of OpenAI's API that is not supported."""
    return bad_request(param, message, "unsupported_parameter")


@contextlib.contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Raises EdgeError in place of AioRpcError, with the fields' names of a request."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, names) from error


def from_rpc(error: grpc.aio.AioRpcError, names: FieldNames = UNNAMED) -> EdgeError:
    """Returns the error for a failed gRPC call; `names` are those of the request's fields."""
    found = _details(error)
    status, kind = _STATUS.get(error.code(), _BROKEN)
    message = names.within(error.details() or error.code().name, found.field)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not found.reason:
        message = UNREACHABLE
    made = EdgeError(status, kind, message, param=names.of(found.field), code=found.reason.lower())
    made.retry_after_s = found.retry_after_s
    return made


@dataclasses.dataclass
class _Found:
    field: str = ""
    reason: str = ""
    retry_after_s: float = 0.0


def _details(error: grpc.aio.AioRpcError) -> _Found:
    found = _Found()
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            found.reason = info.reason
            feature = info.metadata.get("feature", "")  # a field, or the name of a call
            found.field = found.field or (feature if feature.islower() else "")
        elif detail.Unpack(bad) and bad.field_violations:
            found.field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            found.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return found
