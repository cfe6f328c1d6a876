"""A smaller model or a head drafts: its own keys and values, in the blocks that the sequence has anyway.

A block id names a block of the target's cache and one of the drafter's: the second is allocated, shared, copied and
moved with the first and needs no books of its own. What has not been computed yet is computed when somebody asks, so it
costs nothing while nobody does. Writing what a shared block holds already changes nothing: equal tokens, equal values
(but for the last entry of a head's block, which knows the token behind the block: that may cost a draft). Drafts are
sampled with the noise of the positions they are for, so that they often agree with the target's tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.plan import Ask, DraftTree
from engine.sampling.rows import KnobRows, SamplingRows, allow, bits_of
from engine.sampling.sampler import Sampler
from engine.speculation.drafters import Drafter
from engine.speculation.proposer import Draft
from kernels.metadata import AttentionMetadata


@dataclasses.dataclass(slots=True)
class _Read:
    """What the drafter has computed of a sequence.

    Attributes:
        place: the table's, for which this is true.
        num: entries.
        fed: of these, the tokens of the last, which were drafts: some may not have been kept.
    """

    place: int
    num: int
    fed: list[int]


@dataclasses.dataclass(slots=True)
class _Row:
    """A sequence while it is drafted for: its tokens with the drafts, of which `num` entries are computed.

    Attributes:
        others: of each draft, the alternatives to it, likelier ones first; nothing is computed of them.
    """

    ask: Ask
    read: _Read
    tokens: Sequence[int]
    drafts: list[int]
    num: int
    lag: int
    others: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def answer(self) -> Draft:
        """The drafts, a tree where there are alternatives."""
        tree = [(token, i - 1) for i, token in enumerate(self.drafts)]
        tree += [(token, i - 1) for i, others in enumerate(self.others[: len(self.drafts)]) for token in others]
        if len(tree) == len(self.drafts):
            return self.drafts
        ids, parents = zip(*tree, strict=True)
        return DraftTree(ids, parents)

    @property
    def missing(self) -> int:
        """Entries to compute before the next token is drafted."""
        return len(self.tokens) + len(self.drafts) - self.lag - self.num

    @property
    def is_done(self) -> bool:
        """Whether it has all drafts that were asked for, or one that is no token: nothing follows that."""
        return len(self.drafts) >= self.ask.num or self.drafts[-1] < 0

    def take(self, num: int) -> list[int]:
        """The tokens of the next `num` entries to compute."""
        first = self.num + self.lag
        behind = first - len(self.tokens)
        if behind >= 0:
            return self.drafts[behind : behind + num]
        return [*self.tokens[first : first + num]]


class DraftProposer:
    """One model or head, drafting for all who ask at once."""

    writes_cache = True

    def __init__(self, drafter: Drafter, cache: list[Tensor], block_size: int, max_tokens: int) -> None:
        """`cache`: as of `Drafter.new_cache`, of as many blocks as the target's; `max_tokens`: computed at one time."""
        self._drafter = drafter
        self._cache = cache
        self._size = block_size
        self._max_tokens = max_tokens
        self._sampler = Sampler()
        self._holds: dict[int, bytes] = {}  # block → name of the block of tokens that it has the draft's values of

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Proposer`."""
        rows = [self._row(ask) for ask in asks if self._reaches(ask)]
        caught_up = self._catch_up(rows)
        going, states = caught_up, None
        while going:
            going, states = self._compute(going, [row.missing for row in going], states)
            kept = [i for i, row in enumerate(going) if not row.is_done]
            if len(kept) < len(going):
                going, states = [going[i] for i in kept], states[kept]
        for row in caught_up:
            self._forget(row)
        drafted = {id(row.ask): row.answer for row in caught_up}
        return [drafted.get(id(ask), []) for ask in asks]

    def _forget(self, row: _Row) -> None:
        """What was computed of drafts is of use where it would be the same of tokens; a head's would not."""
        if row.drafts[-1] < 0:
            row.drafts.pop()
        num_fed = row.num - (len(row.tokens) - self._drafter.lag)
        if self._drafter.lag:
            row.read.num -= num_fed
        else:
            row.read.fed = row.drafts[:num_fed]

    def _reaches(self, ask: Ask) -> bool:
        """Whether positions are within the model's, and nothing of the table was given back."""
        end = len(ask.tokens) + ask.num - 1
        is_within = end <= self._drafter.context_length and end <= len(ask.blocks) * self._size
        return is_within and not ask.is_trimmed and len(ask.tokens) > self._drafter.lag

    def _row(self, ask: Ask) -> _Row:
        read = ask.memory.state
        if not isinstance(read, _Read) or read.place != ask.place:
            read = ask.memory.state = _Read(ask.place, self._known(ask), [])
        # Of the drafts it computed, those that were kept are tokens now.
        first = read.num - len(read.fed)
        for i, token in enumerate(read.fed):
            if first + i >= len(ask.tokens) or ask.tokens[first + i] != token:
                read.num = first + i
                break
        read.fed = []
        lag = self._drafter.lag
        read.num = min(read.num, len(ask.tokens) - 1 - lag)
        return _Row(ask, read, ask.tokens, [], read.num, lag)

    def _known(self, ask: Ask) -> int:
        """Leading tokens that other sequences have had computed, in blocks that they share."""
        num = 0
        for block, name in zip(ask.blocks, ask.names, strict=False):
            if self._holds.get(block) != name:
                break
            num += self._size
        return num

    def _catch_up(self, rows: list[_Row]) -> list[_Row]:
        """Compute prompts, in parts; the rows that have only as much left as one step takes."""
        room = self._max_tokens
        ready: list[_Row] = []
        late: list[_Row] = []
        shares: list[int] = []
        for row in sorted(rows, key=lambda row: row.missing):
            num = min(row.missing, room)
            room -= num
            if num == row.missing:
                ready.append(row)
            elif num:
                late.append(row)
                shares.append(num)
        if late:
            self._compute(late, shares, None)
        return ready

    def _compute(self, rows: list[_Row], nums: list[int], states: Tensor | None) -> tuple[list[_Row], Tensor]:
        """Compute so many entries of each row, from `states` [rows, hidden] where these are drafts'. A token is drafted
        where that is all there are: such rows, and their states."""
        order = sorted(range(len(rows)), key=lambda i: nums[i] > 1)  # rows of one token come first
        rows, nums = [rows[i] for i in order], [nums[i] for i in order]
        ids = [token for row, num in zip(rows, nums, strict=True) for token in row.take(num)]
        contexts = [row.num + num for row, num in zip(rows, nums, strict=True)]
        device = self._drafter.device
        meta = AttentionMetadata.build(nums, contexts, self._tables(rows, contexts), self._size, device)
        hidden = self._drafter.forward(torch.tensor(ids, device=device), self._cache, meta, states)
        ends = [i for i, row in enumerate(rows) if nums[i] == row.missing]
        for row, num in zip(rows, nums, strict=True):
            self._note(row, num)
        ending = [rows[i] for i in ends]
        hidden = hidden[meta.last_tokens if len(ends) == len(rows) else meta.last_tokens[ends]]
        if ending:
            self._sample(ending, self._drafter.logits(hidden))
        return ending, hidden

    def _sample(self, rows: list[_Row], logits: Tensor) -> None:
        """A draft for each row from logits [rows, V]; and to those of some width alternatives, each of which is what
        would be drafted if the ones before it could not be."""
        knobs = _sampling_rows(rows, self._drafter.vocab_size)
        width = max(row.ask.width for row in rows)
        left = logits.clone() if width > 1 else logits
        drafted = self._sampler.sample(logits, knobs).ids
        for row, token in zip(rows, drafted, strict=True):
            row.drafts.append(token)
            row.others.append([])
        for num in range(1, width):
            places = [i for i, token in enumerate(drafted) if token >= 0]
            if not places:  # nothing else may be said
                break
            left[places, [drafted[i] for i in places]] = float("-inf")
            drafted = self._sampler.sample(left.clone(), knobs).ids
            for row, token in zip(rows, drafted, strict=True):
                if token >= 0 and num < row.ask.width:
                    row.others[-1].append(token)

    def _tables(self, rows: list[_Row], contexts: list[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        width = -(-max(contexts) // self._size)
        tables = np.zeros((len(rows), width), dtype=np.int32)
        for row, table in zip(rows, tables, strict=True):
            blocks = row.ask.blocks[:width]
            table[: len(blocks)] = blocks
        return tables

    def _note(self, row: _Row, num: int) -> None:
        """More of the row is computed: full blocks that have a name can be used by others."""
        ask, first = row.ask, row.num // self._size
        row.num += num
        row.read.num = row.num
        for i in range(first, min(row.num // self._size, len(ask.names))):
            self._holds[ask.blocks[i]] = ask.names[i]


def _sampling_rows(rows: list[_Row], vocab_size: int) -> SamplingRows:
    """As the target's rows, but for what depends on the tokens that exist: agreement is all that a draft is for."""
    params = [row.ask.params for row in rows]
    seeds = [one.seed - (1 << 64) if one.seed >= 1 << 63 else one.seed for one in params]
    knobs = KnobRows(
        temperature=np.array([one.temperature for one in params], dtype=np.float32),
        top_k=np.array([one.top_k for one in params], dtype=np.int64),
        top_p=np.array([one.top_p for one in params], dtype=np.float32),
        min_p=np.array([one.min_p for one in params], dtype=np.float32),
        typical_p=np.array([one.typical_p for one in params], dtype=np.float32),
        seed=np.array(seeds, dtype=np.int64),
        output=np.array([row.ask.output_index for row in rows], dtype=np.int64),
        allowed=allow(
            [(i, bits_of(one.allowed_token_ids, vocab_size)) for i, one in enumerate(params) if one.allowed_token_ids]
        ),
    )
    return SamplingRows(knobs, np.array([len(row.tokens) + len(row.drafts) for row in rows], dtype=np.int64))
