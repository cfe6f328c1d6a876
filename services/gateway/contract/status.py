"""Maps a `ServiceError` to a gRPC status with google.rpc details. All statuses are made here, independent of the
call."""

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from sluice_server.engine.errors import Code, ServiceError

DOMAIN = "sluice"
DETAILS_KEY = "grpc-status-details-bin"
CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

Metadata = tuple[tuple[str, str | bytes], ...]


def to_rpc(
    error: ServiceError, extra: Mapping[str, str] | None = None, used: Message | None = None
) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error.

    It always has an ErrorInfo, with `extra` in its metadata; a BadRequest with a field; a RetryInfo where a retry makes
    sense; a QuotaFailure or ResourceInfo where it fits; and last `used`, the usage until then.
    """
    metadata = {**error.details, **(extra or {})}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if error.field and error.code == Code.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s > 0:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.reason == "QUOTA_EXCEEDED":
        broken = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{error.details.get('tenant', '')}", description=error.message
        )
        details.append(error_details_pb2.QuotaFailure(violations=[broken]))
    if error.code == Code.NOT_FOUND:
        kind = error.reason.removesuffix("_NOT_FOUND").lower()
        name = error.details.get("name", "")
        details.append(
            error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=error.message)
        )
    if used is not None:
        details.append(used)
    return status_pb2.Status(code=int(error.code), message=error.message, details=[_packed(one) for one in details])


def to_status(
    error: ServiceError, extra: Mapping[str, str] | None = None, used: Message | None = None
) -> tuple[grpc.StatusCode, str, Metadata]:
    """Returns code, message and trailing metadata, as `context.abort` takes them."""
    status = rpc_status.to_status(to_rpc(error, extra, used))
    return CODES[int(error.code)], error.message, tuple(status.trailing_metadata)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
