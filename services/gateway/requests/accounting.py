"""Counts what one request is charged and has used: quota, reserved tokens, first token, drafts. Pure: time is passed
in."""

from collections.abc import Sequence

from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.gateway.requests.output_state import OutputState
from sluice_server.services.messages.details import Admitted, Embedded, Routed, Timings
from sluice_server.services.messages.messages import Text
from sluice_server.services.messages.work import Stops
from sluice_server.services.telemetry.observed import RequestUsage


class Accounting:
    """The account of one request.

    Attributes:
        reserved: tokens that admission sets aside for the request.
        image_bytes: bytes that its images hold, by admission's count.
        charged: tokens charged against the tenant's quota.
        admitted: the engine's message about the admitted request; None before.
        first_token_s: time when the first token came; None before.
    """

    def __init__(self, started_s: float, reserved: int = 0, gaps: Histogram | None = None) -> None:
        """`gaps`: histogram of the seconds between two messages with tokens of one output."""
        self.reserved = reserved
        self.charged = 0
        self.image_bytes = 0
        self.admitted: Admitted | None = None
        self.first_token_s: float | None = None
        self.started_s = started_s
        self._gaps = gaps
        self._drafts = DraftStats()  # of all outputs
        self._timings: Timings | None = None  # of vectors

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt; 0 until the engine has admitted the request."""
        return self.admitted.num_prompt if self.admitted is not None else 0

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were in the prefix cache; 0 until the engine has admitted the request."""
        return self.admitted.num_cached if self.admitted is not None else 0

    def record(self, text: Text, output: OutputState, now_s: float) -> None:
        """Counts a message that has come for `output`."""
        if self.admitted is None and text.admitted is not None:
            self.admitted = text.admitted
        for num_drafted, num_accepted in text.drafts:
            self._drafts.record(num_drafted, num_accepted)
        if not text.tokens:
            return
        if self.first_token_s is None:
            self.first_token_s = now_s
        if output.came_s and self._gaps is not None:
            self._gaps.observe(now_s - output.came_s)
        output.came_s = now_s

    def record_vectors(self, found: Embedded) -> None:
        """Counts the answer to a request for vectors."""
        self.admitted = Admitted(sum(found.num_tokens), found.num_cached, 0, Stops())
        self._timings = found.timings

    def used(
        self, outputs: Sequence[OutputState], last: Text | None, engine: str = "", routed: Routed | None = None
    ) -> RequestUsage:
        """Returns the usage so far; `last` is the message that finished the generation, None before. `engine` computes
        the last attempt, and is that one for the reason `routed`."""
        drafts = self._drafts
        return RequestUsage(
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_image=self.admitted.num_image if self.admitted is not None else 0,
            num_completion=sum([output.num_tokens for output in outputs]),
            num_reasoning=sum([output.num_reasoning for output in outputs]),
            num_drafted=drafts.num_drafted,
            num_accepted=drafts.num_accepted,
            drafted_at=tuple(drafts.drafted_at),
            accepted_at=tuple(drafts.accepted_at),
            ttft_s=self.first_token_s - self.started_s if self.first_token_s is not None else 0.0,
            finish_reason=last.finish.value if last and last.finish else "",
            timings=last.timings if last else self._timings,
            engine=engine,
            routed=routed,
        )
