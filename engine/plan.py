"""What one step will do, as flat lists: the scheduler's decision and all that a runner is told.

A row is one scheduled sequence; rows with one token to compute come before longer ones. A row may end in drafted
tokens, which the step verifies: what is sampled before and behind each of them says which are kept. Stdlib only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams

IN_FLIGHT = -1  # stands for a token that a step in flight samples: only the device knows it


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A sequence takes a slot: the runner resets everything it keeps for that slot.

    Attributes:
        slot: the permanent row of the runner's state.
        barred_ids: ids that may not be sampled before position `min_position` (min_tokens).
        min_position: first position whose token may be one of `banned_ids`.
        output_index: of the output within its request: part of the key of its noise.
        tokens: prompt and output so far, where what is sampled depends on them; else empty.
        num_prompt: how many of `tokens` are the prompt's.
    """

    slot: int
    params: SamplingParams
    banned_ids: tuple[int, ...]
    min_position: int
    output_index: int = 0
    tokens: tuple[int, ...] = ()
    num_prompt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        step: counts from 1.
        slots: per row, the sequence's slot.
        query_lens: per row, tokens to compute, ≥ 1.
        starts: per row, position of the first of them = tokens already in the cache.
        token_ids: the tokens to compute of all rows, one row after the other; IN_FLIGHT for what the row's slot samples
            in a step that nobody has collected yet.
        samples: per row, whether its last token is the newest that exists, so that one is sampled after it.
        placements: slots newly taken since the last plan, applied first.
        new_blocks: (slot, index in its block table, block ids) added since the last plan.
        drafts: rows whose last tokens are drafted, and how many: a token is sampled before the first and behind each.
        parents: of rows whose drafts are a tree and no chain; see `engine.speculation.trees`.
    """

    step: int
    slots: list[int]
    query_lens: list[int]
    starts: list[int]
    token_ids: list[int]
    samples: list[bool]
    placements: list[Placement]
    new_blocks: list[tuple[int, int, list[int]]]
    drafts: dict[int, int] = dataclasses.field(default_factory=dict)
    parents: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    def row(self, i: int) -> "StepPlan":
        """The plan of row `i` alone, its slot already placed: used to find the one request that breaks a step."""
        first = sum(self.query_lens[:i])
        return StepPlan(
            step=self.step,
            slots=[self.slots[i]],
            query_lens=[self.query_lens[i]],
            starts=[self.starts[i]],
            token_ids=self.token_ids[first : first + self.query_lens[i]],
            samples=[self.samples[i]],
            placements=[],
            new_blocks=[],
            drafts={0: self.drafts[i]} if i in self.drafts else {},
            parents={0: self.parents[i]} if i in self.parents else {},
        )

    def known(self, sampled: Mapping[int, int]) -> "StepPlan":
        """The plan with what is in flight filled in from what slots have sampled; nothing of use where that failed."""
        if IN_FLIGHT not in self.token_ids:
            return self
        ids, at = list(self.token_ids), 0
        for slot, num in zip(self.slots, self.query_lens, strict=True):
            if ids[at] == IN_FLIGHT:
                ids[at] = max(0, sampled[slot])
            at += num
        return dataclasses.replace(self, token_ids=ids)

    def without_drafts(self) -> "StepPlan":
        """Of a plan of one row: its certain tokens only."""
        num = self.num_tokens - self.drafts[0]
        return dataclasses.replace(self, query_lens=[num], token_ids=self.token_ids[:num], drafts={}, parents={})

    def halves(self) -> "tuple[StepPlan, StepPlan]":
        """Of a plan of one row without drafts: its first tokens, behind which nothing is sampled, and the rest."""
        num = self.num_tokens // 2
        first = dataclasses.replace(self, query_lens=[num], token_ids=self.token_ids[:num], samples=[False])
        rest = dataclasses.replace(
            self,
            query_lens=[self.num_tokens - num],
            starts=[self.starts[0] + num],
            token_ids=self.token_ids[num:],
        )
        return first, rest

    def drafted(self, i: int, end: int) -> list[int]:
        """The drafted tokens of row `i`, whose tokens end before index `end` of `token_ids`."""
        return self.token_ids[end - self.drafts.get(i, 0) : end]


class TokenLogprob(NamedTuple):
    """Natural-log probability of one sampled token under the raw logits, and its best rivals.

    A named tuple, as many are made in a step: a third of a frozen dataclass's time.

    Attributes:
        rank: 1 for the most likely token.
        top_ids: the most likely ids, best first, as many as were asked for.
        asked_ids: further ids that were asked for, with their log probabilities and ranks.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked_ids: tuple[int, ...] = ()
    asked_logprobs: tuple[float, ...] = ()
    asked_ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of tokens of a prompt, contiguous from position `first` (≥ 1)."""

    first: int
    scores: tuple[TokenLogprob, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """What a row with k drafts sampled: 1 + k tokens at most, each as if all drafts before it were right. Of a tree
    only those behind the drafts that stand.

    Attributes:
        logprobs: as many as tokens, or none if they were not asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made of its rows.

    Attributes:
        token_ids: per row, the sampled token (the first one of a row with drafts), or -1 for a row that samples none.
        failed: rows whose logits held no usable number (NaN, infinity) or whose computation raised.
        logprobs: of the rows that asked for them and have no drafts.
        runs: of the rows with drafts.
        errors: of the failed rows that know what their request did to fail.
        prompts: what rows tell of their prompts, where that is asked for.
    """

    token_ids: list[int]
    failed: frozenset[int] = frozenset()
    logprobs: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    runs: dict[int, VerifiedDrafts] = dataclasses.field(default_factory=dict)
    errors: dict[int, ServiceError] = dataclasses.field(default_factory=dict)
    prompts: dict[int, PromptLogprobs] = dataclasses.field(default_factory=dict)


class ProposerMemory:
    """Where a proposer keeps what it knows of one sequence; gone with the sequence.

    Attributes:
        num_read: tokens of it that the proposer has read when it was last asked.
        num_unread: those that it had no time to read: no draft comes before.
    """

    __slots__ = ("num_read", "num_unread", "state")

    def __init__(self) -> None:
        self.state: object = None
        self.num_read = self.num_unread = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that the next step could verify drafts for.

    Attributes:
        tokens: prompt and output so far, in place: to be read at once, never kept or changed.
        blocks: its block table, likewise, with room for all drafts but the last where that was asked for.
        names: of its leading blocks (see `cache.prefix`), as far as they are known, likewise.
        place: another number whenever the table was begun anew.
        is_trimmed: leading blocks were given back, as they left the window.
        num: drafts at most one behind the other, ≥ 1.
        width: drafts at most that follow the same token; 1 is a chain.
    """

    tokens: Sequence[int]
    blocks: Sequence[int]
    params: SamplingParams
    output_index: int
    num: int
    memory: ProposerMemory
    names: Sequence[bytes] = ()
    place: int = 0
    is_trimmed: bool = False
    width: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts that branch, the ones least worth it last: a step may have no room for them."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # see `engine.speculation.trees`


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Drafts that are kept: the longest prefix equal to what was sampled in its place."""
    num = min(len(drafts), len(sampled) - 1)
    return next((i for i in range(num) if drafts[i] != sampled[i]), num)
