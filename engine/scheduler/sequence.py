"""One sequence's mutable state while it is open: its tokens, how many of them are computed, and what it holds.

There is no phase: a sequence has tokens that exist and tokens computed; a step lets the second catch up with the first.
"""

import dataclasses
import enum
from typing import TYPE_CHECKING

from sluice_server.engine.kv_cache.cache import BlockTable
from sluice_server.engine.plan import ProposerMemory, TokenLogprob
from sluice_server.engine.speculation.controller import AcceptanceRecord

if TYPE_CHECKING:  # each names the other
    from sluice_server.engine.scheduler.group import SequenceGroup

NO_SLOT = -1


@dataclasses.dataclass(slots=True, eq=False)
class Drafting:
    """What a sequence that may be drafted for has to do with it.

    Attributes:
        limit: drafts of one step at most.
        record: of its drafts, for whoever chooses their length.
        num_seen: tokens that the proposer has read when it was last asked.
        ids: proposed for the next step, or being verified by the one in flight: behind the tokens that exist.
        parents: of these, where they are a tree; else empty.
    """

    limit: int
    record: AcceptanceRecord = dataclasses.field(default_factory=AcceptanceRecord)
    num_seen: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    memory: ProposerMemory = dataclasses.field(default_factory=ProposerMemory)


class SequenceStatus(enum.Enum):
    """Where a sequence stands. Only RUNNING holds a slot and blocks."""

    WAITING = enum.auto()  # in the queue
    UNFORKED = enum.auto()  # its group's first sequence computes the prompt for it
    PAUSED = enum.auto()  # without credit or input, and its blocks were taken back
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and holdings of one output (or hypothesis) of one request."""

    group: "SequenceGroup"
    index: int  # of the output; noise is keyed by it
    tokens: list[int]  # prompt, then output
    table: BlockTable
    state: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    num_computed: int = 0
    room: int = 0  # tokens that its blocks take without asking the cache
    num_blocks_told: int = 0  # blocks of the table that plans have carried to the runner
    num_places: int = 0  # times that it was given a slot, and began its table
    num_once_computed: int = 0  # before it was preempted
    last_step: int = 0
    refused_free: int = -1  # free blocks when they were too few for it
    retry_step: int = 0  # until then it would bring too high a peak
    num_preemptions: int = 0
    has_spoken: bool = False  # its first event is out
    score: float = 0.0  # of a search: sum of the log probabilities of its output
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # of a search: held until its end
    candidates: TokenLogprob | None = None  # of a beam: what may follow; it waits for its siblings
    drafting: Drafting | None = None  # None: no drafts

    @property
    def key(self) -> tuple[float, int, int]:
        """Smaller goes first."""
        return (self.group.measure, self.group.order, self.index)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.group.prompt)

    @property
    def num_missing(self) -> int:
        """Tokens that may be computed now."""
        return self.group.num_ready(self) - self.num_computed

    @property
    def is_idle(self) -> bool:
        """Holds a slot, and has nothing to do until its client acts."""
        return self.group.is_held and self.num_missing <= 0
