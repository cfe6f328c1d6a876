"""What a gateway tells of itself: the protocols, what they carry, and a watcher that looks away. Knows no role."""

import dataclasses
from typing import Protocol

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Timings
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import ChatPrompt, Generate, Work


@dataclasses.dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request that was admitted."""

    envelope: Envelope  # its trace context is the caller's
    method: str  # the RPC's own name, without its service
    work: Work
    is_streamed: bool = False

    @property
    def params(self) -> SamplingParams | None:
        """None where nothing is generated."""
        return self.work.params if isinstance(self.work, Generate) else None

    @property
    def is_chat(self) -> bool:
        """Whether its prompt is a conversation."""
        return isinstance(self.work, Generate) and isinstance(self.work.prompt, ChatPrompt)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUsage:
    """What a request has used when it ends, well or not. Times in seconds; `ttft_s` is 0 without a token."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_reasoning: int = 0  # of them
    num_drafted: int = 0
    num_accepted: int = 0  # of those that were drafted
    drafted_at: tuple[int, ...] = ()  # the same by their place in the draft
    accepted_at: tuple[int, ...] = ()
    ttft_s: float = 0.0
    finish_reason: str = ""
    timings: Timings | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was not let in. `method` is the RPC's own name, with its service before a slash if that is not
    InferenceService; `tenant` is "" while nobody knows."""

    method: str
    error: ServiceError
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""


class RequestTrace(Protocol):
    """Follows one request."""

    @property
    def traceparent(self) -> str:
        """W3C context that later stages hang their spans under, or ""."""

    def first_token(self) -> None:
        """Its first token has come."""

    def happened(self, name: str, **attributes: int) -> None:
        """Something worth telling of: it was `replayed`, `reattached`."""

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """It is over; `status_code` is gRPC's (0 is OK), `reason` that of ErrorInfo or ""."""


class Observer(Protocol):
    """Follows a gateway."""

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """A request was admitted."""

    def refused(self, refused: RefusedRequest) -> str:
        """A request was not let in; the W3C header of its trace, or ""."""

    def count(self, name: str, **labels: str) -> None:
        """Something happened that has no request: a replay (`replayed`), a dropped message (`dropped`)."""


class Unobserved:
    """An observer and trace that does nothing but hand the caller's trace context on."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """Pass the caller's context on."""
        return Unobserved(started.envelope.traceparent)

    def refused(self, refused: RefusedRequest) -> str:
        """Name the caller's trace."""
        return refused.traceparent

    def count(self, name: str, **labels: str) -> None:
        """Nothing."""

    def first_token(self) -> None:
        """Nothing."""

    def happened(self, name: str, **attributes: int) -> None:
        """Nothing."""

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """Nothing."""
