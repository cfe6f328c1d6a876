"""The plan of one step as flat lists: the scheduler's decision and the complete input of a runner.

A row is one scheduled sequence; rows with one token to compute come before longer ones. A row may end in drafts, which
the step verifies: the tokens sampled before and behind each of them show which are kept. Stdlib only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import PromptImage
from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.prompt_embeds import PromptEmbeds
from sluice_server.engine.request import Pooling, SamplingParams

NO_ADAPTER = -1  # the slot of what is computed by the base alone
IN_FLIGHT = -1  # placeholder for a token that a step in flight samples: its value is only on the device


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Gives a slot to a sequence: the runner resets everything it keeps for that slot.

    Attributes:
        slot: the permanent row of the runner's state.
        params: the sequence's sampling parameters.
        banned_ids: ids that may not be sampled before position `min_position` (min_tokens).
        min_position: first position whose token may be one of `banned_ids`.
        output_index: index of the output within its request; part of the key of its noise.
        tokens: prompt and output so far, where sampling depends on them; else empty.
        num_prompt: how many of `tokens` are the prompt's.
        pooling: how hidden states are pooled; None where tokens are sampled.
        num_first: tokens of the first of two texts; None where there is one text.
        prompt_embeds: embeddings of its first tokens; None: those of the model.
        images: those of its prompt, in their order.
        adapter: the adapter's slot; NO_ADAPTER for the base.
    """

    slot: int
    params: SamplingParams
    banned_ids: tuple[int, ...]
    min_position: int
    output_index: int = 0
    tokens: tuple[int, ...] = ()
    num_prompt: int = 0
    pooling: Pooling | None = None
    num_first: int | None = None
    prompt_embeds: PromptEmbeds | None = None
    images: tuple[PromptImage, ...] = ()
    adapter: int = NO_ADAPTER


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    Attributes:
        step: number of the step, from 1.
        slots: per row, the sequence's slot.
        query_lens: per row, tokens to compute, ≥ 1.
        starts: per row, position of the first of them = tokens already in the cache.
        token_ids: the tokens to compute of all rows, one row after the other; IN_FLIGHT for a token that the row's slot
            samples in a step that is not collected yet.
        samples: per row, whether its last token is the newest that exists, so that one is sampled after it.
        placements: slots newly assigned since the last plan, applied first.
        new_blocks: what has changed in block tables since the last plan, to be applied in this order.
        drafts: number of drafts by row, for rows that end in drafts: a token is sampled before the first and behind
            each.
        parents: of rows whose drafts are a tree and not a chain; see `engine.speculation.trees`.
        pools: rows whose hidden states are pooled, each with whether its prompt ends in this step.
        wholes: ranges of `token_ids` that are tokens of one image, where these see one another: each within a row.
    """

    step: int
    slots: list[int]
    query_lens: list[int]
    starts: list[int]
    token_ids: list[int]
    samples: list[bool]
    placements: list[Placement]
    new_blocks: list[BlockRun]
    drafts: dict[int, int] = dataclasses.field(default_factory=dict)
    parents: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    pools: dict[int, bool] = dataclasses.field(default_factory=dict)
    wholes: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this step."""
        return len(self.token_ids)

    def row(self, i: int) -> "StepPlan":
        """Returns the plan of row `i` alone, its slot already placed: used to find the request that breaks a step."""
        first = sum(self.query_lens[:i])
        last = first + self.query_lens[i]
        return StepPlan(
            step=self.step,
            slots=[self.slots[i]],
            query_lens=[self.query_lens[i]],
            starts=[self.starts[i]],
            token_ids=self.token_ids[first:last],
            samples=[self.samples[i]],
            placements=[],
            new_blocks=[],
            drafts={0: self.drafts[i]} if i in self.drafts else {},
            parents={0: self.parents[i]} if i in self.parents else {},
            pools={0: self.pools[i]} if i in self.pools else {},
            wholes=_between(self.wholes, first, last),
        )

    def known(self, sampled: Mapping[int, int]) -> "StepPlan":
        """Returns the plan with IN_FLIGHT tokens replaced by the tokens `sampled` by slot; 0 after a failure."""
        if IN_FLIGHT not in self.token_ids:
            return self
        ids, at = list(self.token_ids), 0
        for slot, num in zip(self.slots, self.query_lens, strict=True):
            if ids[at] == IN_FLIGHT:
                ids[at] = max(0, sampled[slot])
            at += num
        return dataclasses.replace(self, token_ids=ids)

    def without_drafts(self) -> "StepPlan":
        """Returns a plan of one row without its drafts."""
        num = self.num_tokens - self.drafts[0]
        return dataclasses.replace(self, query_lens=[num], token_ids=self.token_ids[:num], drafts={}, parents={})

    @property
    def middle(self) -> int:
        """Tokens of the first half of a plan of one row without drafts; 0 where it cannot be split."""
        num = self.num_tokens // 2
        for first, end in self.wholes:
            if first < num < end:
                return first or end % self.num_tokens
        return num

    def halves(self) -> "tuple[StepPlan, StepPlan]":
        """Splits a plan of one row with a `middle`: its first tokens, after which nothing is sampled, and the rest."""
        num = self.middle
        first = dataclasses.replace(
            self,
            query_lens=[num],
            token_ids=self.token_ids[:num],
            samples=[False],
            pools=dict.fromkeys(self.pools, False),
            wholes=_between(self.wholes, 0, num),
        )
        rest = dataclasses.replace(
            self,
            query_lens=[self.num_tokens - num],
            starts=[self.starts[0] + num],
            token_ids=self.token_ids[num:],
            wholes=_between(self.wholes, num, self.num_tokens),
        )
        return first, rest

    def drafted(self, i: int, end: int) -> list[int]:
        """Returns the drafts of row `i`, whose tokens end before index `end` of `token_ids`."""
        return self.token_ids[end - self.drafts.get(i, 0) : end]


def _between(ranges: Sequence[tuple[int, int]], begin: int, stop: int) -> list[tuple[int, int]]:
    """Returns the ranges from `begin` to `stop`, as seen from there."""
    return [(first - begin, end - begin) for first, end in ranges if begin <= first and end <= stop]


class TokenLogprob(NamedTuple):
    """Natural-log probability of one sampled token under the raw logits, with the most likely alternatives.

    A named tuple, since many are created in a step: it takes a third of a frozen dataclass's time.

    Attributes:
        logprob: log probability of the token.
        rank: 1 for the most likely token.
        top_ids: the most likely ids, best first, as many as requested.
        top_logprobs: their log probabilities.
        asked_ids: further requested ids, with their log probabilities and ranks.
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
    """The tokens sampled by a row with k drafts: 1 + k at most, each as if all drafts before it were right.

    Of a draft tree, only the tokens behind the drafts that are kept.

    Attributes:
        logprobs: as many as tokens, or none if they were not requested.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by row.

    Attributes:
        token_ids: per row, the sampled token (the first one of a row with drafts), or -1 for a row that samples none.
        failed: rows whose logits held no usable number (NaN, infinity) or whose computation raised.
        logprobs: of rows without drafts that requested them.
        runs: tokens of the rows with drafts.
        errors: errors of failed rows, where the cause is known.
        prompts: log probabilities of prompt tokens, for rows that requested them.
        pooled: vectors (float32, little-endian) of the rows whose pooled prompts ended.
    """

    token_ids: list[int]
    failed: frozenset[int] = frozenset()
    logprobs: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    runs: dict[int, VerifiedDrafts] = dataclasses.field(default_factory=dict)
    errors: dict[int, ServiceError] = dataclasses.field(default_factory=dict)
    prompts: dict[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    pooled: dict[int, bytes] = dataclasses.field(default_factory=dict)


class ProposerMemory:
    """A proposer's state for one sequence; dropped with the sequence.

    Attributes:
        num_read: tokens of the sequence that the proposer read for its last answer.
        num_unread: tokens that it had no time to read; it returns no drafts until they are read.
    """

    __slots__ = ("num_read", "num_unread", "state")

    def __init__(self) -> None:
        self.state: object = None
        self.num_read = self.num_unread = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence for which the next step could verify drafts.

    Attributes:
        tokens: prompt and output so far, not copied: read during the call, never keep or change.
        blocks: its block table, likewise; with capacity for all drafts but the last if that was requested.
        names: names of its leading blocks (see `cache.prefix`), as far as they are known, likewise.
        place: changes whenever the table was started again.
        is_trimmed: leading blocks were freed, as they left the attention window.
        num: length of a chain of drafts at most, ≥ 1.
        width: drafts at most that follow the same token; 1 is a chain.
        num_prompt: how many of `tokens` are the prompt's.
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
    num_prompt: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts that branch, the least valuable last: a step may have no capacity for them."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # see `engine.speculation.trees`


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns the number of drafts that are kept: the longest prefix equal to the tokens sampled in its place."""
    num = min(len(drafts), len(sampled) - 1)
    return next((i for i in range(num) if drafts[i] != sampled[i]), num)
