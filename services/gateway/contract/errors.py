"""The errors that a gateway itself raises, and the conversion of those that a stage sent. Independent of the
transport."""

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.gateway.contract.wire import MAX_FIELDS
from sluice_server.services.messages.messages import Failed


def bare(error: ServiceError) -> ServiceError:
    """Returns the error without traceback and context. An error that is kept, as a request's outcome or by its call,
    would otherwise keep alive all objects of the frames that it passed through."""
    error.__context__ = None
    return error.with_traceback(None)


def from_failed(failed: Failed) -> ServiceError:
    """Returns the error that a stage sent; an unknown code becomes INTERNAL."""
    code = Code(failed.code) if failed.code in Code._value2member_map_ else Code.INTERNAL
    return ServiceError(
        code,
        failed.reason,
        failed.message,
        field=failed.field,
        details=failed.details,
        retry_after_s=failed.retry_after_s,
    )


def malformed(type_name: str) -> ServiceError:
    """INVALID_ARGUMENT: the bytes cannot be parsed as a request."""
    return invalid(
        "request",
        f"is not a valid {type_name}: broken encoding, text that is not UTF-8, or more than {MAX_FIELDS} fields",
    )


def not_found(kind: str, name: str, hint: str) -> ServiceError:
    """NOT_FOUND for a `model` or a `generation`; `hint` tells the client what to do."""
    shown = name if len(name) <= 128 else name[:128] + "…"
    return ServiceError(
        Code.NOT_FOUND,
        f"{kind.upper()}_NOT_FOUND",
        f"{kind} {shown!r} is not known here; {hint}",
        details={"name": shown},
    )


def duplicate(generation_id: str) -> ServiceError:
    """DUPLICATE_REQUEST: the idempotency key names a generation that is open."""
    return ServiceError(
        Code.ALREADY_EXISTS,
        "DUPLICATE_REQUEST",
        f"idempotency_key names a generation that is in flight, {generation_id}: resume that one",
        field="idempotency_key",
        details={"generation_id": generation_id},
    )


def draining() -> ServiceError:
    """DRAINING: the server shuts down and takes no new requests."""
    return ServiceError(
        Code.UNAVAILABLE, "DRAINING", "this server is shutting down: send the request to another one", retry_after_s=1.0
    )


def loading() -> ServiceError:
    """MODEL_LOADING: the service has not made its first token yet."""
    return ServiceError(
        Code.UNAVAILABLE, "MODEL_LOADING", "the model is not ready yet: try again shortly", retry_after_s=1.0
    )


def slow_consumer(last_seq: int | None = None) -> ServiceError:
    """SLOW_CONSUMER: the client did not read its stream fast enough. `last_seq` None: a stream of several
    generations."""
    last = "" if last_seq is None else f"; delta {last_seq} is the last that was sent"
    return ServiceError(
        Code.ABORTED,
        "SLOW_CONSUMER",
        f"the stream was not read fast enough and was ended{last}",
        details={} if last_seq is None else {"last_seq": str(last_seq)},
    )


def credit_exhausted(last_seq: int) -> ServiceError:
    """Returns the error for a generation whose credit is used up on a half-closed stream: no grant can follow."""
    return ServiceError(
        Code.ABORTED,
        "SLOW_CONSUMER",
        "the credit of this generation is used up and its stream is half-closed, so no grant can follow; "
        f"delta {last_seq} is the last that was sent",
        details={"last_seq": str(last_seq)},
    )
