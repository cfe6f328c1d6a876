"""Errors that have an author: they asked for something wrong, or we are full, or we broke.

Raised anywhere from the door to the engine, carried round the ring as plain fields, and mapped to a gRPC status once,
at the gateway. The numbers of `Code` are gRPC's own, so no table is needed and no gRPC import either.
"""

import enum


class Code(enum.IntEnum):
    """The gRPC status codes that we answer with."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class ServiceError(Exception):
    """A request that ends without a result. A program reads `code` and `reason`, a person reads the message.

    Attributes:
        code: the gRPC status code.
        reason: UPPER_SNAKE reason for `google.rpc.ErrorInfo`.
        message: what, with which value, against which limit, and what to do.
        details: further facts as strings (`limit`, `actual`, `feature`), never an exception's own text.
        field: the request field at fault, or "".
        retry_after_s: seconds after which trying again makes sense; 0 when it does not.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        field: str = "",
        details: dict[str, str] | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.field = field
        self.details = details or {}
        self.retry_after_s = retry_after_s


def invalid(field: str, message: str, **details: object) -> ServiceError:
    """A malformed or out-of-range parameter; `message` names the value and the limit."""
    text = {key: str(value) for key, value in details.items()}
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_PARAMETER", f"{field}: {message}", field=field, details=text)


def context_exceeded(actual: int, limit: int, message: str) -> ServiceError:
    """Prompt plus what is to be generated does not fit the model's context."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        message,
        field="prompt",
        details={"limit": str(limit), "actual": str(actual)},
    )


def unsupported(feature: str, message: str = "") -> ServiceError:
    """A feature of the contract that this server does not have. Never accepted and ignored."""
    text = message or f"{feature} is not supported by this server"
    return ServiceError(Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED", text, field=feature, details={"feature": feature})


def never_fits(actual: int, limit: int) -> ServiceError:
    """The request needs more cache blocks than exist, however long it waits."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "KV_CAPACITY",
        f"prompt and max_tokens need {actual} cache blocks; this server has {limit}: "
        "lower max_tokens, shorten the prompt, or start the server with a larger --kv-cache-tokens",
        details={"limit": str(limit), "actual": str(actual)},
    )


def queue_full(depth: int, limit: int, retry_after_s: float = 1.0) -> ServiceError:
    """No room now; worth trying again after `retry_after_s`."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{depth} requests are open; this server admits {limit}: try again later",
        details={"queue_depth": str(depth), "limit": str(limit)},
        retry_after_s=retry_after_s,
    )


def deadline_unattainable(seconds: float, left: float) -> ServiceError:
    """At the rate measured, the request would end after its deadline."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "DEADLINE_UNATTAINABLE",
        f"at the present rate this request takes {seconds:.3f} s; its deadline leaves {max(left, 0.0):.3f} s: "
        "allow more time, lower max_tokens, or try again later",
        details={"actual": f"{seconds:.3f}", "limit": f"{max(left, 0.0):.3f}"},
        retry_after_s=max(seconds - left, 0.1),
    )


def not_open(request_id: str) -> ServiceError:
    """A frame for a request that is unknown or has ended."""
    return ServiceError(Code.NOT_FOUND, "NOT_OPEN", f"the request {request_id} is not open here; it may have ended")


def constraint_lost() -> ServiceError:
    """An output cannot follow its constraint any further."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "CONSTRAINT_TOO_COMPLEX",
        "constraint: to follow it any further takes more than a token may cost here: make it simpler",
        field="constraint",
    )


def nothing_left() -> ServiceError:
    """What a request allows and what it bars leave no token to be sampled."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "NO_TOKEN_LEFT",
        "no token is left that the request allows at this place: bar fewer ids and words, or allow more",
        field="sampling",
    )


def deadline_exceeded() -> ServiceError:
    """The client's deadline passed."""
    return ServiceError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the request's deadline passed before it finished")


def cancelled() -> ServiceError:
    """The client went away or asked for the end."""
    return ServiceError(Code.CANCELLED, "CLIENT_CANCELLED", "the generation was cancelled")


def engine_fault(message: str = "the engine failed while computing this request") -> ServiceError:
    """Our own fault; the text is fixed so that nothing internal leaks."""
    return ServiceError(Code.INTERNAL, "ENGINE_FAULT", message)


def stage_lost(role: str) -> ServiceError:
    """A process of the ring is gone or does not answer."""
    return ServiceError(
        Code.UNAVAILABLE,
        "STAGE_LOST",
        f"the {role} process of this server was lost; the request can be sent again",
        details={"role": role},
        retry_after_s=1.0,
    )


def backlog_full(role: str, actual: int, limit: int) -> ServiceError:
    """The next process takes nothing, and what waits for it has reached its bound."""
    return ServiceError(
        Code.UNAVAILABLE,
        "BACKLOG_FULL",
        f"{actual} bytes wait in the {role} for a process of this server that takes nothing, and at most {limit} may: "
        "send the request again later",
        details={"role": role, "actual": str(actual), "limit": str(limit)},
        retry_after_s=1.0,
    )


def schema_mismatch(reader: str, reads: int, sender: str, sends: int) -> ServiceError:
    """Two processes of the ring are of releases whose messages differ."""
    return ServiceError(
        Code.UNAVAILABLE,
        "SCHEMA_MISMATCH",
        f"the process {sender} of this server sends messages of version {sends}, and {reader} reads version {reads}: "
        "run one release in all processes of a ring, then send the request again",
        details={"sender": sender, "actual": str(sends), "reader": reader, "limit": str(reads)},
        retry_after_s=5.0,
    )


def other_revision(asked: str, served: str) -> ServiceError:
    """A process was replaced by one that serves another model revision: what was begun is never spliced."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "REVISION_CHANGED",
        f"the request began on model revision {asked}, and this server now serves {served}: send it again",
        details={"limit": served, "actual": asked},
    )


class OutOfDeviceMemory(Exception):
    """A step needs more memory than the device has left: a smaller one may not."""


class DeviceLost(Exception):
    """The device answers no more: the process cannot go on, and is to be started again."""
