"""Service errors: a request was invalid, the server is full, or the server failed.

Raised in any stage from the gateway's admission to the engine, carried round the ring as plain fields, and mapped to a
gRPC status once, at the gateway. The numbers of `Code` are gRPC's own, so that no table and no gRPC import are needed.
"""

import enum


class Code(enum.IntEnum):
    """The gRPC status codes that the server returns."""

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


PROCESSOR_FAILED = "LOGITS_PROCESSOR_FAILED"
STRATEGY_FAILED = "SAMPLING_STRATEGY_FAILED"


class ServiceError(Exception):
    """The error of a request that ends without a result. Programs read `code` and `reason`, people read the message.

    Attributes:
        code: the gRPC status code.
        reason: UPPER_SNAKE reason for `google.rpc.ErrorInfo`.
        message: what is wrong, with which value, against which limit, and what to do.
        details: further facts as strings (`limit`, `actual`, `feature`), never an exception's own text.
        field: the request field at fault, or "".
        retry_after_s: seconds after which a retry may succeed; 0 when it cannot.
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
    """Returns the error for a malformed or out-of-range parameter; `message` names the value and the limit."""
    text = {key: str(value) for key, value in details.items()}
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_PARAMETER", f"{field}: {message}", field=field, details=text)


def context_exceeded(actual: int, limit: int, message: str, field: str = "prompt") -> ServiceError:
    """Returns the error for a prompt and output that together exceed the model's context."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        message,
        field=field,
        details={"limit": str(limit), "actual": str(actual)},
    )


def unsupported(feature: str, message: str = "") -> ServiceError:
    """Returns the error for a feature of the API that this server does not have. Such a feature is never ignored."""
    text = message or f"{feature} is not supported by this server"
    return ServiceError(Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED", text, field=feature, details={"feature": feature})


def never_fits(actual: int, limit: int) -> ServiceError:
    """Returns the error for a request that needs more cache blocks than exist, however long it waits."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "KV_CAPACITY",
        f"prompt and max_tokens need {actual} cache blocks; this server has {limit}: "
        "lower max_tokens, shorten the prompt, or start the server with a larger --kv-cache-tokens",
        details={"limit": str(limit), "actual": str(actual)},
    )


def queue_full(depth: int, limit: int, retry_after_s: float = 1.0) -> ServiceError:
    """Returns the error for a full queue; a retry may succeed after `retry_after_s`."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{depth} requests are open; this server admits {limit}: try again later",
        details={"queue_depth": str(depth), "limit": str(limit)},
        retry_after_s=retry_after_s,
    )


def memory_pressure(retry_after_s: float = 2.0) -> ServiceError:
    """Returns the error for a new request while there is hardly any memory left; running ones go on."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "MEMORY_PRESSURE",
        "this server has hardly any memory left, and takes new requests again when running ones have ended: try again "
        "later, or at another server",
        retry_after_s=retry_after_s,
    )


def deadline_unattainable(seconds: float, left: float) -> ServiceError:
    """Returns the error for a request that would end after its deadline at the measured rate."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "DEADLINE_UNATTAINABLE",
        f"at the present rate this request takes {seconds:.3f} s; its deadline leaves {max(left, 0.0):.3f} s: "
        "allow more time, lower max_tokens, or try again later",
        details={"actual": f"{seconds:.3f}", "limit": f"{max(left, 0.0):.3f}"},
        retry_after_s=max(seconds - left, 0.1),
    )


def not_open(request_id: str) -> ServiceError:
    """Returns the error for a message to a request that is unknown or has ended."""
    return ServiceError(Code.NOT_FOUND, "NOT_OPEN", f"the request {request_id} is not open here; it may have ended")


def constraint_lost() -> ServiceError:
    """Returns the error for an output that cannot follow its constraint any further."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "CONSTRAINT_TOO_COMPLEX",
        "constraint: finding the tokens that it allows next takes longer than this server permits: make it simpler",
        field="constraint",
    )


def nothing_left() -> ServiceError:
    """Returns the error for a request whose allowed and banned tokens leave none to sample."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "NO_TOKEN_LEFT",
        "the request allows no token at this position: ban fewer ids and words, or allow more",
        field="sampling",
    )


def deadline_exceeded() -> ServiceError:
    """Returns the error for a client's deadline that has passed."""
    return ServiceError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the request's deadline passed before it finished")


def cancelled() -> ServiceError:
    """Returns the error for a client that disconnected or cancelled."""
    return ServiceError(Code.CANCELLED, "CLIENT_CANCELLED", "the generation was cancelled")


def engine_fault(message: str = "the engine failed while computing this request") -> ServiceError:
    """Returns the error for a fault of the engine. Its text is fixed, so that nothing internal leaks."""
    return ServiceError(Code.INTERNAL, "ENGINE_FAULT", message)


def processor_failed(name: str, what: str) -> ServiceError:
    """Returns the error for a request whose logits processor failed; `what` it did, without its exception's text."""
    text = f"logits processor {name!r} {what}; the server's log has the details"
    return ServiceError(Code.INTERNAL, PROCESSOR_FAILED, text, details={"processor": name})


def strategy_failed(name: str, what: str) -> ServiceError:
    """Returns the error for a request whose sampling strategy failed; `what` it did, without its exception's text."""
    text = f"sampling strategy {name!r} {what}; the server's log has the details"
    return ServiceError(Code.INTERNAL, STRATEGY_FAILED, text, details={"strategy": name})


def stage_lost(role: str) -> ServiceError:
    """Returns the error for a process of the ring that has ended or does not respond."""
    return ServiceError(
        Code.UNAVAILABLE,
        "STAGE_LOST",
        f"the {role} process of this server was lost; the request can be sent again",
        details={"role": role},
        retry_after_s=1.0,
    )


def backlog_full(role: str, actual: int, limit: int) -> ServiceError:
    """Returns the error for a full backlog: the next process accepts no messages, and too many wait for it."""
    return ServiceError(
        Code.UNAVAILABLE,
        "BACKLOG_FULL",
        f"{actual} bytes wait in the {role} for a process of this server that takes nothing, and at most {limit} may: "
        "send the request again later",
        details={"role": role, "actual": str(actual), "limit": str(limit)},
        retry_after_s=1.0,
    )


def schema_mismatch(reader: str, reads: int, sender: str, sends: int) -> ServiceError:
    """Returns the error for two processes of the ring whose releases have different messages."""
    return ServiceError(
        Code.UNAVAILABLE,
        "SCHEMA_MISMATCH",
        f"the process {sender} of this server sends messages of version {sends}, and {reader} reads version {reads}: "
        "run one release in all processes of a ring, then send the request again",
        details={"sender": sender, "actual": str(sends), "reader": reader, "limit": str(reads)},
        retry_after_s=5.0,
    )


def other_revision(asked: str, served: str) -> ServiceError:
    """Returns the error for a process replaced by one of another model revision, as outputs of two are never joined."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "REVISION_CHANGED",
        f"the request began on model revision {asked}, and this server now serves {served}: send it again",
        details={"limit": served, "actual": asked},
    )


class OutOfDeviceMemory(Exception):
    """A step needs more memory than the device has left; a smaller step may fit."""


class DeviceLost(Exception):
    """The device no longer responds: the process cannot continue and must be restarted."""


class RankLost(DeviceLost):
    """A rank of this engine's group has ended, is stuck or cannot go on: the group must be started anew."""


class RankFailed(Exception):
    """A step failed on another rank of the group; all ranks are ready for the next one."""
