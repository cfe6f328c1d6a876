"""What a gateway reports about its requests: protocols, their data, and an implementation that does nothing.

Independent of the exporters, which `observer` connects.
"""

import dataclasses
from typing import Protocol

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Routed, Timings
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import ChatPrompt, Generate, Work


@dataclasses.dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request that was admitted."""

    envelope: Envelope  # its trace context is the caller's
    method: str  # name of the RPC without its service
    work: Work
    is_streamed: bool = False

    @property
    def params(self) -> SamplingParams | None:
        """The sampling parameters; None for a request that generates nothing."""
        return self.work.params if isinstance(self.work, Generate) else None

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return isinstance(self.work, Generate) and isinstance(self.work.prompt, ChatPrompt)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUsage:
    """What a request has used when it ends, successfully or not. Times in seconds; `ttft_s` is 0 without a token."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_reasoning: int = 0  # part of `num_completion`
    num_drafted: int = 0
    num_accepted: int = 0  # part of `num_drafted`
    drafted_at: tuple[int, ...] = ()  # drafted tokens by position in the draft
    accepted_at: tuple[int, ...] = ()
    ttft_s: float = 0.0
    num_image: int = 0  # part of `num_prompt`
    finish_reason: str = ""
    timings: Timings | None = None
    engine: str = ""  # that of the last attempt
    routed: Routed | None = None  # why it was that one


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was refused at admission. `method` is the name of the RPC, preceded by its service and a slash
    if that is not InferenceService; `tenant` is "" if it is unknown."""

    method: str
    error: ServiceError
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""


class RequestTrace(Protocol):
    """Observes one request."""

    @property
    def traceparent(self) -> str:
        """The W3C context that is the parent of later stages' spans, or ""."""

    def first_token(self) -> None:
        """Note that the first token has come."""

    def happened(self, name: str, **attributes: int) -> None:
        """Note an event of the request: `replayed`, `handed_off`, `hedge_won` or `reattached`."""

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """Note the end; `status_code` is gRPC's (0 is OK), `reason` is ErrorInfo's or ""."""


class Observer(Protocol):
    """Observes a gateway."""

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """Note that a request was admitted. Returns the observer of that request."""

    def refused(self, refused: RefusedRequest) -> str:
        """Note that a request was refused. Returns the W3C header of its trace, or ""."""

    def count(self, name: str, **labels: str) -> None:
        """Count an event: a replay (`replayed`), a hand-off (`handed_off`), a second attempt (`hedged`), one that
        goes on (`hedge_won`) or a dropped message (`dropped`)."""


class Unobserved:
    """An observer and request trace that records nothing and passes on the caller's trace context."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """Returns a trace with the caller's context."""
        return Unobserved(started.envelope.traceparent)

    def refused(self, refused: RefusedRequest) -> str:
        """Returns the caller's trace context."""
        return refused.traceparent

    def count(self, name: str, **labels: str) -> None:
        """Does nothing."""

    def first_token(self) -> None:
        """Does nothing."""

    def happened(self, name: str, **attributes: int) -> None:
        """Does nothing."""

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """Does nothing."""
