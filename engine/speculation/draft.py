"""Drafts with a smaller model or a head, whose keys and values lie in blocks numbered like the sequence's own.

A block id names a block of the target's cache and one of the drafter's. The second is allocated, shared, copied and
moved with the first and needs no accounting of its own. Entries are computed only when drafts are requested, so a
proposer that is not used costs nothing. Writing again what a shared block already holds changes nothing, as equal
tokens give equal values. The exception is the last entry of a head's block, which depends on the token behind the
block; this may cost a draft.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sluice_server.engine.plan import DraftRequest
from sluice_server.engine.speculation.draft_passes import DraftPass, DraftPasses
from sluice_server.engine.speculation.draft_rows import DrafterProgress, DraftRow
from sluice_server.engine.speculation.draft_sampling import DraftSampling
from sluice_server.engine.speculation.proposer import Draft
from sluice_server.kernels.layout.ragged import Tables


class DraftProposer:
    """Drafts with one model or head for all requests of a step at once."""

    writes_cache = True

    def __init__(self, passes: DraftPasses, max_tokens: int) -> None:
        """`max_tokens`: entries read of sequences before their first draft, per call at most."""
        self._passes = passes
        self._drafter = passes.drafter
        self._size = passes.block_size
        self._max_tokens = max_tokens
        self._sampling = DraftSampling(passes.drafter.vocab_size)
        self._holds: dict[int, bytes] = {}  # block → name of the tokens whose drafter entries it holds

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """Implements `Proposer.propose`."""
        reached = [ask for ask in asks if self._reaches(ask)]
        rows = [self._row(at, ask) for at, ask in enumerate(reached)]
        for ask in asks:
            ask.memory.num_read = ask.memory.num_unread = 0
        tables = _tables(rows)
        caught_up = self._catch_up(rows, tables)
        going, states = caught_up, None
        while going:
            going, states = self._compute(going, [row.missing for row in going], tables, states)
            kept = [i for i, row in enumerate(going) if not row.is_done]
            if len(kept) < len(going):
                going, states = [going[i] for i in kept], None if states is None else states[kept]
        for row in caught_up:
            row.forget()
        drafted = {id(row.ask): row.answer for row in caught_up}
        return [drafted.get(id(ask), []) for ask in asks]

    def _reaches(self, ask: DraftRequest) -> bool:
        """Returns whether all positions are within the model's and the block table is complete."""
        end = len(ask.tokens) + ask.num - 1
        is_within = end <= self._drafter.context_length and end <= len(ask.blocks) * self._size
        return is_within and not ask.is_trimmed and len(ask.tokens) > self._drafter.lag

    def _row(self, at: int, ask: DraftRequest) -> DraftRow:
        read = ask.memory.state
        if not isinstance(read, DrafterProgress) or read.place != ask.place:
            read = ask.memory.state = DrafterProgress(ask.place, self._known(ask), [])
        read.keep(ask.tokens)
        lag = self._drafter.lag
        read.num = min(read.num, len(ask.tokens) - 1 - lag)
        return DraftRow(at, ask, read, read.num, lag)

    def _known(self, ask: DraftRequest) -> int:
        """Returns how many leading tokens are computed already, by sequences that share these blocks."""
        num = 0
        for block, name in zip(ask.blocks, ask.names, strict=False):
            if self._holds.get(block) != name:
                break
            num += self._size
        return num

    def _catch_up(self, rows: list[DraftRow], tables: Tables) -> list[DraftRow]:
        """Computes missing entries within the token limit; returns the rows that one more pass completes."""
        room = self._max_tokens
        ready: list[DraftRow] = []
        late: list[DraftRow] = []
        shares: list[int] = []
        for row in sorted(rows, key=lambda row: row.missing):
            num, memory = min(row.missing, room), row.ask.memory
            room -= num
            memory.num_read, memory.num_unread = num, row.missing - num
            if not memory.num_unread:
                ready.append(row)
            elif num:
                late.append(row)
                shares.append(num)
        if late:
            self._compute(late, shares, tables, None)
        return ready

    def _compute(
        self, rows: list[DraftRow], nums: list[int], tables: Tables, states: Tensor | None
    ) -> tuple[list[DraftRow], Tensor | None]:
        """Computes `nums` entries of each row, from `states` [rows, hidden] where these are the drafts' own.

        Drafts a token for each row that has no further entry missing. Returns these rows in the order of `DraftRow.at`,
        and their states.
        """
        if states is None:
            order = sorted(range(len(rows)), key=lambda i: nums[i] > 1)  # the kernels expect rows of one token first
            rows, nums = [rows[i] for i in order], [nums[i] for i in order]
        ends = sorted([i for i, row in enumerate(rows) if nums[i] == row.missing], key=lambda i: rows[i].at)
        one = DraftPass(
            ids=[token for row, num in zip(rows, nums, strict=True) for token in row.take(num)],
            nums=nums,
            contexts=[row.num + num for row, num in zip(rows, nums, strict=True)],
            tables=tables[[row.at for row in rows]],
            ends=ends,
            states=states,
        )
        left = self._passes.compute(one)
        for row, num in zip(rows, nums, strict=True):
            self._note(row, num)
        if left is None:
            return [], None
        ending = [rows[i] for i in ends]
        self._sampling.draw(ending, left.logits)
        return ending, left.hidden

    def _note(self, row: DraftRow, num: int) -> None:
        """Records `num` more computed entries of the row. Full blocks with a name can be used by other sequences."""
        ask, first = row.ask, row.num // self._size
        row.num += num
        row.read.num = row.num
        for i in range(first, min(row.num // self._size, len(ask.names))):
            self._holds[ask.blocks[i]] = ask.names[i]


def _tables(rows: Sequence[DraftRow]) -> Tables:
    """Returns the rows' block tables, int32 [rows, blocks]."""
    tables = np.zeros((len(rows), max([len(row.ask.blocks) for row in rows], default=0)), dtype=np.int32)
    for row, table in zip(rows, tables, strict=True):
        table[: len(row.ask.blocks)] = row.ask.blocks
    return tables
