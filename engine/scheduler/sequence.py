"""Mutable state of one sequence while it is open: its tokens, how many of them are computed, and what it holds.

There are no phases: a sequence has existing tokens and computed tokens, and each step brings the second number closer
to the first.
"""

import dataclasses
import enum
from typing import TYPE_CHECKING

from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.plan import NO_ADAPTER, ProposerMemory, TokenLogprob
from sluice_server.engine.speculation.controller import AcceptanceRecord

if TYPE_CHECKING:  # circular import
    from sluice_server.engine.scheduler.group import SequenceGroup

NO_SLOT = -1


@dataclasses.dataclass(slots=True, eq=False)
class Drafting:
    """Draft state of a sequence that may be drafted for.

    Attributes:
        limit: drafts per step at most.
        first: tokens at the start of the sequence that the proposer never reads.
        record: acceptance of its drafts, for the controller that chooses their length.
        num_seen: tokens that the proposer had read after its last request.
        ids: drafts for the next step, or those verified by the step in flight; they follow the existing tokens.
        parents: parents of these in a draft tree; empty for a chain.
        memory: the proposer's state for this sequence.
    """

    limit: int
    first: int = 0
    record: AcceptanceRecord = dataclasses.field(default_factory=AcceptanceRecord)
    num_seen: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    memory: ProposerMemory = dataclasses.field(default_factory=ProposerMemory)


class SequenceStatus(enum.Enum):
    """Status of a sequence. Only RUNNING holds a slot and blocks."""

    WAITING = enum.auto()  # in the queue
    UNFORKED = enum.auto()  # its group's first sequence computes the prompt for it
    PAUSED = enum.auto()  # without credit or with open input, and its blocks were freed
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and resources of one output (or hypothesis) of one request."""

    group: "SequenceGroup"
    index: int  # index of the output; part of the key of its noise
    tokens: list[int]  # prompt, then output
    table: BlockTable
    state: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    adapter_slot: int = NO_ADAPTER  # of its request's adapter, while it holds a slot
    num_computed: int = 0
    num_flying: int = 0  # tokens that steps in flight compute, where others are planned beside them (stages)
    capacity: int = 0  # tokens that its blocks hold without a call of the cache
    num_blocks_planned: int = 0  # blocks of the table that plans have carried to the runner
    # (group, first index, number) of blocks that were freed since, behind a window
    freed: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    num_places: int = 0  # times that it got a slot and started its table
    num_once_computed: int = 0  # tokens computed before it was preempted
    last_step: int = 0
    refused_free: int = -1  # number of free blocks when it was refused for too few
    retry_step: int = 0  # step until which its predicted peak is too high
    num_preemptions: int = 0
    waited_at: int = -1  # tokens begun when it had to wait for a block last
    num_waits: int = 0  # steps that it has waited there
    has_spoken: bool = False  # its first event was emitted
    score: float = 0.0  # of a search: sum of the log probabilities of its output
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # of a search: held until its end
    candidates: TokenLogprob | None = None  # of a beam: its candidates, until all siblings have theirs
    drafting: Drafting | None = None  # None: no drafts

    @property
    def key(self) -> tuple[float, int, int]:
        """Sort key of the order of service; the smallest goes first."""
        return (self.group.measure, self.group.order, self.index)

    @property
    def num_output(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.tokens) - len(self.group.prompt)

    @property
    def num_missing(self) -> int:
        """Number of tokens that may be computed now, and that no step in flight computes."""
        return self.group.num_ready(self) - self.num_computed - self.num_flying

    @property
    def num_begun(self) -> int:
        """Number of tokens that are computed, or will be by the steps in flight."""
        return self.num_computed + self.num_flying

    @property
    def is_pooled(self) -> bool:
        """Whether its prompt is pooled, and no token is sampled."""
        return self.group.request.pooling is not None

    @property
    def is_resumed(self) -> bool:
        """Whether tokens of its request had reached the client before, from an engine that was lost or left."""
        return bool(self.group.request.resume_ids)

    @property
    def is_idle(self) -> bool:
        """Whether it has no token to compute until its client grants credit or sends input; for running sequences."""
        return self.group.is_held and self.num_missing <= 0 and not self.num_flying
