"""The one mapping from our errors to a gRPC status with google.rpc details. Knows no call and no server."""

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.errors import Code, ServiceError, invalid
from services.gateway.contract.wire import MAX_FIELDS
from services.messages.messages import Failed

DOMAIN = "sluice"
DETAILS_KEY = "grpc-status-details-bin"
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

Metadata = tuple[tuple[str, str | bytes], ...]


def from_failed(failed: Failed) -> ServiceError:
    """The error that a stage sent; a code that is not ours counts as an engine fault of ours."""
    code = Code(failed.code) if failed.code in Code._value2member_map_ else Code.INTERNAL
    return ServiceError(
        code,
        failed.reason,
        failed.message,
        field=failed.field,
        details=failed.details,
        retry_after_s=failed.retry_after_s,
    )


def to_rpc(
    error: ServiceError, extra: Mapping[str, str] | None = None, used: Message | None = None
) -> status_pb2.Status:
    """google.rpc.Status: ErrorInfo always, BadRequest with a field, RetryInfo where trying again makes sense; at last
    what was used until then."""
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
    """Code, message and trailing metadata, as `context.abort` takes them."""
    status = rpc_status.to_status(to_rpc(error, extra, used))
    return _CODES[int(error.code)], error.message, tuple(status.trailing_metadata)


def malformed(type_name: str) -> ServiceError:
    """Bytes that are no request."""
    return invalid(
        "request",
        f"is not a valid {type_name}: broken encoding, text that is not UTF-8, or more than {MAX_FIELDS} fields",
    )


def not_found(kind: str, name: str, hint: str) -> ServiceError:
    """NOT_FOUND for a `model` or a `generation`."""
    shown = name if len(name) <= 128 else name[:128] + "…"
    return ServiceError(
        Code.NOT_FOUND,
        f"{kind.upper()}_NOT_FOUND",
        f"{kind} {shown!r} is not known here; {hint}",
        details={"name": shown},
    )


def duplicate(generation_id: str) -> ServiceError:
    """The key names a generation that is in flight."""
    return ServiceError(
        Code.ALREADY_EXISTS,
        "DUPLICATE_REQUEST",
        f"idempotency_key names a generation that is in flight, {generation_id}: resume that one",
        field="idempotency_key",
        details={"generation_id": generation_id},
    )


def draining() -> ServiceError:
    """The server is going away and takes no new work."""
    return ServiceError(
        Code.UNAVAILABLE, "DRAINING", "this server is shutting down: send the request to another one", retry_after_s=1.0
    )


def loading() -> ServiceError:
    """The server has not made its first token yet."""
    return ServiceError(
        Code.UNAVAILABLE, "MODEL_LOADING", "the model is not ready yet: try again shortly", retry_after_s=1.0
    )


def slow_consumer(last_seq: int | None = None) -> ServiceError:
    """The reader did not take what was generated for it; None for a stream of several generations."""
    last = "" if last_seq is None else f"; delta {last_seq} is the last that was sent"
    return ServiceError(
        Code.ABORTED,
        "SLOW_CONSUMER",
        f"the stream was not read fast enough and was ended{last}",
        details={} if last_seq is None else {"last_seq": str(last_seq)},
    )


def nobody_grants(last_seq: int) -> ServiceError:
    """The credit is spent and the client has half-closed its stream: nobody can grant more."""
    return ServiceError(
        Code.ABORTED,
        "SLOW_CONSUMER",
        "the credit of this generation is spent and its stream is half-closed, so that nobody can grant more; "
        f"delta {last_seq} is the last that was sent",
        details={"last_seq": str(last_seq)},
    )


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
