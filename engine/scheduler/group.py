"""One open request: its sequences and what they share: prompt, limits, credit, place in the order of service.

The first sequence computes the prompt. The others are forked from it just before the prompt's last token, which each
computes itself, as the token sampled after it is its own. Pure state: no cache, no step.
"""

import dataclasses

from sluice_server.engine.plan import PromptLogprobs, TokenLogprob
from sluice_server.engine.request import EngineRequest, FinishReason, Pooling, SamplingParams
from sluice_server.engine.scheduler.beam import BeamSearch
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.timeline import EventKind, TimelineEvent


@dataclasses.dataclass(frozen=True, slots=True)
class CompletedBeam:
    """A complete output of a search, kept until the request ends."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason
    index: int = 0  # of the output; equal scores rank by it, not by which ended first


@dataclasses.dataclass(slots=True, eq=False)
class SequenceGroup:
    """State of one request while it is open."""

    request: EngineRequest
    request_id: str
    order: int  # arrival number
    prompt: list[int]
    params: SamplingParams  # as the runner gets them: with the candidates that a search needs
    asked_tokens: int  # requested max_tokens, 0 for all that the context leaves; may be updated
    max_tokens: int  # effective limit
    priority: int  # may be updated
    deadline_s: float  # may be updated
    banned_ids: tuple[int, ...]  # ids that end an output, banned before min_tokens
    end_ids: frozenset[int]
    credit: int | None  # tokens that may be sampled; None is without limit
    is_open: bool
    beam: BeamSearch | None = None
    measure: float = 0.0  # sort key from the policy
    sequences: list[Sequence] = dataclasses.field(default_factory=list)  # outputs that have not ended
    unforked: list[Sequence] = dataclasses.field(default_factory=list)  # those of them that wait to be forked
    spare_slots: list[int] = dataclasses.field(default_factory=list)  # reserved for sequences yet to be forked
    held_since_s: float = 0.0
    completed: list[CompletedBeam] = dataclasses.field(default_factory=list)
    prompt_scores: list[TokenLogprob] | None = None  # of its second token on, until reported; None: not requested
    num_cached: int = -1  # prompt tokens found in the prefix cache when first scheduled; -1: not yet
    num_sampled: int = 0  # tokens of outputs that have ended
    num_preemptions: int = 0  # preemptions of all outputs
    drafts: DraftStats = dataclasses.field(default_factory=DraftStats)  # drafts of all outputs
    num_overtaken: int = 0  # admissions of later requests since it first did not fit
    first_scheduled_s: float = -1.0
    first_token_s: float = -1.0
    is_held: bool = False  # no token may be sampled: there is no credit, or the input is open
    holds_back: bool = False  # is_held, or sequences wait to be forked: see num_ready
    needs_host: bool = dataclasses.field(init=False)  # its next token depends on the last one on the host

    def __post_init__(self) -> None:
        pools = self.request.pooling is not None  # no token is sampled that a step planned ahead could compute
        self.needs_host = self.params.needs_tokens or self.params.is_search or pools

    @property
    def can_fork(self) -> bool:
        """Whether sequences wait to be forked, and the complete prompt is computed up to its last token."""
        return bool(self.unforked) and not self.is_open and self.sequences[0].num_computed >= len(self.prompt) - 1

    def num_slots(self, sequence: Sequence) -> int:
        """Returns the free slots that admission of the sequence requires: one for every sequence of its group."""
        if self.beam is not None:
            return self.beam.width
        return 1 + len(self.unforked)

    def num_ready(self, sequence: Sequence) -> int:
        """Returns the tokens of the sequence that may be computed now; a token is sampled after the last one."""
        if self.unforked:
            return len(self.prompt) - 1
        return len(sequence.tokens) - self.is_held

    @property
    def num_findable(self) -> int:
        """Leading tokens that may come from the prefix cache: none that are still to be scored, and none of a mean, as
        cached tokens have no hidden states."""
        if self.request.pooling is Pooling.MEAN:
            return 0
        scores = self.prompt_scores
        if scores is None or len(scores) >= len(self.prompt) - 1:
            return len(self.prompt) + self.max_tokens
        return len(scores)

    def learn(self, found: PromptLogprobs) -> None:
        """Appends scores of the prompt. Skips tokens that were scored already and computed again after a preemption."""
        if self.prompt_scores is not None:
            known = 1 + len(self.prompt_scores) - found.first
            assert known >= 0, "a token of the prompt was passed over"
            self.prompt_scores += found.scores[known:]

    def has_token(self, now: float) -> None:
        """Records the time of the first token; called for every sampled token."""
        if self.first_token_s < 0:
            self.first_token_s = now
            self.note(EventKind.FIRST_TOKEN, now)

    def note(self, kind: EventKind, now: float, num_tokens: int = 0, output_index: int = 0) -> None:
        """Adds an event to the request's timeline, if it is traced."""
        if self.request.timeline is not None:
            self.request.timeline.note(TimelineEvent(kind, now, num_tokens, output_index))

    def refresh_hold(self) -> None:
        """Derives `is_held` and `holds_back`. Called after each change of credit, input or forks."""
        self.is_held = self.is_open or self.credit == 0
        self.holds_back = self.is_held or bool(self.unforked)
