"""A smaller model of the same vocabulary drafts: its own keys and values, in the blocks that the sequence has anyway.

A block id names a block of the target's cache and one of the draft's: the second is allocated, shared, copied and moved
with the first and needs no books of its own. What the draft has not computed yet it computes when it is asked, so it
costs nothing while nobody asks. Writing what a shared block holds already changes nothing: equal tokens, equal values.
Drafts are sampled with the noise of the positions they are for, so that they often agree with the target's tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import Code, ServiceError
from engine.models.model import Model
from engine.plan import Ask
from engine.sampling.rows import SamplingRows, allow, bits_of
from engine.sampling.sampler import Sampler
from kernels.metadata import AttentionMetadata


@dataclasses.dataclass(slots=True)
class _Read:
    """What the draft has computed of a sequence.

    Attributes:
        place: the table's, for which this is true.
        num: tokens.
        fed: of these, the last, which were drafts: some may not have been kept.
    """

    place: int
    num: int
    fed: list[int]


@dataclasses.dataclass(slots=True)
class _Row:
    """A sequence while it is drafted for: its tokens with the drafts, of which the first `num` are computed."""

    ask: Ask
    read: _Read
    tokens: Sequence[int]
    drafts: list[int]
    num: int

    @property
    def missing(self) -> int:
        """Tokens to compute before the next is drafted."""
        return len(self.tokens) + len(self.drafts) - self.num

    def take(self, num: int) -> list[int]:
        """The next `num` tokens to compute."""
        behind = self.num - len(self.tokens)
        if behind >= 0:
            return self.drafts[behind : behind + num]
        return [*self.tokens[self.num : self.num + num]]


class DraftProposer:
    """One model, drafting for all who ask at once."""

    writes_cache = True

    def __init__(self, model: Model, cache: list[Tensor], block_size: int, max_tokens: int) -> None:
        """`cache`: as of `Model.new_cache`, with as many blocks as the target's; `max_tokens`: computed at one time."""
        self._model = model
        self._cache = cache
        self._size = block_size
        self._max_tokens = max_tokens
        self._sampler = Sampler()
        self._holds: dict[int, bytes] = {}  # block → name of the block of tokens that it has the draft's values of

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """See `Proposer`."""
        rows = [self._row(ask) for ask in asks if self._reaches(ask)]
        caught_up = self._catch_up(rows)
        going = caught_up
        while going:
            self._compute(going, [row.missing for row in going])
            going = [row for row in going if len(row.drafts) < row.ask.num]
        for row in caught_up:
            row.read.fed = row.drafts[:-1]
        drafted = {id(row.ask): row.drafts for row in caught_up}
        return [drafted.get(id(ask), []) for ask in asks]

    def _reaches(self, ask: Ask) -> bool:
        """Whether positions are within the model's, and nothing of the table was given back."""
        end = len(ask.tokens) + ask.num - 1
        return end <= self._model.config.context_length and not ask.is_trimmed and end <= len(ask.blocks) * self._size

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
        read.num = min(read.num, len(ask.tokens) - 1)
        return _Row(ask, read, ask.tokens, [], read.num)

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
            self._compute(late, shares)
        return ready

    def _compute(self, rows: list[_Row], nums: list[int]) -> None:
        """Compute so many tokens of each row; one is drafted where that is all there are."""
        order = sorted(range(len(rows)), key=lambda i: nums[i] > 1)  # rows of one token come first
        rows, nums = [rows[i] for i in order], [nums[i] for i in order]
        ids = [token for row, num in zip(rows, nums, strict=True) for token in row.take(num)]
        contexts = [row.num + num for row, num in zip(rows, nums, strict=True)]
        meta = AttentionMetadata.build(nums, contexts, self._tables(rows, contexts), self._size, self._model.device)
        hidden = self._model.forward(torch.tensor(ids, device=self._model.device), meta.positions, self._cache, meta)
        ends = [i for i, row in enumerate(rows) if nums[i] == row.missing]
        for row, num in zip(rows, nums, strict=True):
            self._note(row, num)
        if ends:
            at = meta.last_tokens if len(ends) == len(rows) else meta.last_tokens[ends]
            ending = [rows[i] for i in ends]
            drafted = self._sampler.sample(
                self._model.logits(hidden[at]), _sampling_rows(ending, self._model.config.vocab_size)
            ).ids
            for row, token in zip(ending, drafted, strict=True):
                row.drafts.append(token)

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


def check_draft(draft: Model, target: Model) -> None:
    """Raise ServiceError when one cannot draft for the other, with both numbers."""
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise _unfit(f"has a vocabulary of {ours} ids, the model {theirs}: choose a draft that shares its tokenizer")
    if draft.num_parameters > target.num_parameters:
        raise _unfit(
            f"has {draft.num_parameters} parameters, the model {target.num_parameters}: a draft must be the smaller one"
        )


def _unfit(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", f"--draft-model: {message}", field="draft_model")


def _sampling_rows(rows: list[_Row], vocab_size: int) -> SamplingRows:
    """As the target's rows, but for what depends on the tokens that exist: agreement is all that a draft is for."""
    params = [row.ask.params for row in rows]
    seeds = [one.seed - (1 << 64) if one.seed >= 1 << 63 else one.seed for one in params]
    return SamplingRows(
        temperature=np.array([one.temperature for one in params], dtype=np.float32),
        top_k=np.array([one.top_k for one in params], dtype=np.int64),
        top_p=np.array([one.top_p for one in params], dtype=np.float32),
        min_p=np.array([one.min_p for one in params], dtype=np.float32),
        typical_p=np.array([one.typical_p for one in params], dtype=np.float32),
        seed=np.array(seeds, dtype=np.int64),
        position=np.array([len(row.tokens) + len(row.drafts) for row in rows], dtype=np.int64),
        output=np.array([row.ask.output_index for row in rows], dtype=np.int64),
        allowed=allow(
            [(i, bits_of(one.allowed_token_ids, vocab_size)) for i, one in enumerate(params) if one.allowed_token_ids]
        ),
    )
