"""What the ranks of a group tell each other, as plain data; the sums of a step do not go this way.

Rank 0 plans, samples and decides; the others do what it says in the order in which it says so.
"""

import dataclasses
from typing import TypeAlias

from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message to rank 0. Ranks that differ in anything but `rank` cannot compute one model.

    Attributes:
        epoch: number of one start of the group; 0 if nobody told it to this rank.
        build: version of the software.
        checkpoint: identifies the model's configuration files.
        settings: the engine's settings as text, by name, as far as they must be equal.
    """

    rank: int
    size: int
    epoch: int
    build: str
    checkpoint: str
    settings: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """Rank 0's answer once its group is complete: each rank now loads its part of the model.

    Attributes:
        epoch: number of this start of the group.
        sums: path of the socket at which rank 0 gives the memory of all ranks; "" where they are on several hosts.
    """

    epoch: int
    sums: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0's answer to a rank that does not belong to its group."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Allocate:
    """The size of the cache, and of host memory below it, in blocks.

    Attributes:
        identity: of what computes the blocks, for their files; None without a disk tier.
        on_disk: names of the blocks that rank 0 has on disk; a rank keeps files of no others.
        passed_on: layers of earlier stages behind which the last one needs hidden states, for a draft head.
    """

    num_blocks: int
    num_host: int
    identity: CacheIdentity | None = None
    on_disk: tuple[bytes, ...] = ()
    passed_on: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Slots with a new sequence, whose block tables are empty, and what has changed in block tables since.

    Attributes:
        adapters: the adapter slot of each sequence, -1 for the base.
    """

    slots: list[int]
    new_blocks: list[BlockRun]
    adapters: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class FillSlot:
    """An adapter slot gets the adapter at a path, or is emptied if that is "".

    Attributes:
        digest: that the adapter's files must have.
    """

    slot: int
    path: str = ""
    digest: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class GiveRows:
    """Rows of images that take the place of embeddings in the next launch: float32 [N, width], from the step's token
    `first` on."""

    first: int
    width: int
    rows: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A step to compute, answered by `Launched`.

    Attributes:
        num: number of the launch, from 1; retries of a step are launches of their own.
        plan: without placements and new blocks.
        is_whole: the hidden states of all tokens are needed.
        spans: ranges of the step's tokens whose logits score prompts.
        turned: positions in three directions of tokens that follow or are an image, int64 [3, N], with the index of the
            first token.
    """

    num: int
    plan: StepPlan
    is_whole: bool
    spans: list[tuple[int, int]]
    turned: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class BeginStep:
    """A step of fixed shape to begin on each rank's device, recorded there or not; answered by `Launched` once it is in
    the device's queue.

    Attributes:
        num: number of the launch, as in `Launch`.
        num_rows, per_row, form: of its shape; see `GraphKey`.
        given, numbers: int64; see `StepNumbers`.
        tokens: what slots have got since the last step: (slot, first position, ids).
        is_sampled: rank 0 samples on its device, and shares the ids.
    """

    num: int
    num_rows: int
    per_row: int
    form: str
    given: bytes
    numbers: bytes
    tokens: list[tuple[int, int, list[int]]]
    is_sampled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Transfers between cache blocks and host slots."""

    moves: list[Move]


@dataclasses.dataclass(frozen=True, slots=True)
class SaveBlocks:
    """The last transfers, to disk, for so many seconds at most; nothing is computed any more. Answered by `Saved`."""

    moves: list[Move]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class MoveAccepted:
    """Accepted drafts behind rejected ones: (slot, position, new position) of their keys and values."""

    moves: list[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells all others by a name: addresses and paths at which they find one another."""

    key: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """A rank has its sums with others, and needs to be told nothing more."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has loaded its part of the model and allocated its cache.

    Attributes:
        layout: what must be equal on all ranks: number formats, and the shape of a block.
        revision: the revision of the model's files, with their weights.
    """

    rank: int
    layout: str
    revision: str


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """The end of a launch on one rank.

    Attributes:
        error: why it failed, or "".
        ran_out: it failed for lack of memory.
        compute_s: seconds from its receipt to its end.
        sums_s: seconds of these in sums with other ranks, and waiting for other stages, so far since start.
        num_sums: calls of sums on a device so far: ranks with other numbers are out of step.
    """

    rank: int
    num: int
    error: str = ""
    ran_out: bool = False
    compute_s: float = 0.0
    sums_s: float = 0.0
    num_sums: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Transfers with the disk that have ended on a rank, each with whether it succeeded."""

    rank: int
    ended: list[tuple[Move, bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A rank has saved its parts of the cache."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank ends, for this reason."""

    rank: int
    reason: str


# Of rank 0, and to rank 0:
Order: TypeAlias = (
    Welcome
    | Refused
    | Allocate
    | Place
    | FillSlot
    | GiveRows
    | Launch
    | BeginStep
    | MoveBlocks
    | MoveAccepted
    | Told
    | SaveBlocks
)
Report: TypeAlias = Hello | RankReady | Launched | RankEnded | Told | Connected | Moved | Saved
