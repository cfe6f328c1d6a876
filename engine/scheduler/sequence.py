"""One sequence's mutable state while it is open: its tokens, how many of them are computed, and what it holds.

There is no phase: a sequence has tokens that exist and tokens computed; a step lets the second catch up with the first.
"""

import dataclasses
import enum

from engine.cache.cache import BlockTable
from engine.plan import TokenLogprob
from engine.request import EngineRequest, FinishReason

NO_SLOT = -1


class State(enum.Enum):
    """Where a sequence stands. Only RUNNING holds a slot and blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and holdings of one output of one request."""

    request: EngineRequest
    order: int  # arrival number: with the priority, the key that it keeps for life
    max_tokens: int  # effective
    barred_ids: tuple[int, ...]  # ids that end the output, barred before min_tokens
    end_ids: frozenset[int]
    tokens: list[int]  # prompt, then output
    table: BlockTable
    state: State = State.WAITING
    slot: int = NO_SLOT
    num_computed: int = 0
    num_blocks_told: int = 0  # blocks of the table that plans have carried to the runner
    num_cached: int = -1  # prompt tokens found in the prefix cache when first scheduled; -1: not yet
    last_step: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float = -1.0
    first_token_s: float = -1.0

    @property
    def key(self) -> tuple[int, int]:
        """Smaller goes first: higher priority, then earlier arrival. Kept through preemption."""
        return (-self.request.priority, self.order)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def num_missing(self) -> int:
        """Tokens that exist but are not computed."""
        return len(self.tokens) - self.num_computed


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Plain durations in seconds of a sequence that ended; services make spans of them.

    Attributes:
        queue_s: arrival to first scheduled.
        prefill_s: first scheduled to first token.
        decode_s: first token to the last.
        end_s: engine clock at the end.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    end_s: float
    num_preemptions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What the engine found when it first scheduled a request."""

    num_prompt: int
    num_cached: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Event: tokens of a request, contiguous from `first_index` (0 is the first output token)."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    admission: Admission | None
    finish: FinishReason | None
    times: Times | None  # with finish
