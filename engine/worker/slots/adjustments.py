"""Logit adjustments of each slot: penalties on its tokens, biases, allowed ids.

Slots without adjustments cost nothing. `reset` drops the state of the slot's former sequence. Takes slots and sampling
parameters.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sluice_server.engine.plan import Placement
from sluice_server.engine.sampling.history import TokenHistories, TokenHistory
from sluice_server.engine.sampling.rows import AllowedTokenRows, Bits, Ints, LogitBiasRows, PenaltyRows, allow, bits_of


class Penalised(NamedTuple):
    """The rows of `slots` that have penalties, and these penalties; valid until a history moves (`num_moves`)."""

    slots: list[int]
    histories: list[tuple[int, TokenHistory]]
    penalties: PenaltyRows
    num_moves: int


class SlotAdjustments:
    """Adjustments by slot, for the slots that have any."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._histories = TokenHistories()
        self._history: dict[int, TokenHistory] = {}
        # Repetition, presence, frequency penalty; same keys as `_history`.
        self._strengths: dict[int, tuple[float, float, float]] = {}
        self._bias: dict[int, LogitBiasRows] = {}  # rows are zeros: each entry is of one slot
        self._allowed: dict[int, Bits] = {}
        self._penalised: Penalised | None = None  # cache for the slots that sampled last; cleared by `reset`

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        slot, params = placement.slot, placement.params
        self._penalised = None
        if slot in self._history:
            self._histories.close(self._history.pop(slot))
        for table in (self._bias, self._allowed):
            table.pop(slot, None)
        if params.has_penalties:
            self._strengths[slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            self._history[slot] = self._histories.open(placement.tokens, placement.num_prompt)
        if params.logit_bias:
            ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
            values = np.array([value for _, value in params.logit_bias], dtype=np.float32)
            self._bias[slot] = LogitBiasRows(np.zeros_like(ids), ids, values)
        if params.allowed_token_ids:
            self._allowed[slot] = bits_of(params.allowed_token_ids, self._vocab_size)

    def listens(self, slot: int) -> bool:
        """Returns whether the slot's tokens must be passed to `note`."""
        return slot in self._history

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`.

        `computed` are the tokens right before it; some of them may be new.
        """
        history = self._history.get(slot)
        if history is not None and history.num_tokens < position:
            history.append(computed[history.num_tokens - position :])

    def penalties(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> PenaltyRows | None:
        """Returns the penalties of these slots, by row. `ahead`: by row, tokens beyond those of its slot."""
        if not self._history:
            return None
        found = self._penalised
        if found is None or found.num_moves != self._histories.num_moves or found.slots != slots:
            found = self._penalised = self._find_penalised(slots)
        if not found.histories:
            return None
        if ahead:
            own = [one.ahead(ahead.get(row, ())) for row, one in found.histories]
            ids, counts = [ids for ids, _ in own], [counts for _, counts in own]
            sizes: Ints = np.array([len(one) for one in ids], dtype=np.int64)
            firsts = np.cumsum(sizes) - sizes
            all_ids, all_counts = np.concatenate(ids), np.concatenate(counts)
            return dataclasses.replace(found.penalties, firsts=firsts, sizes=sizes, ids=all_ids, counts=all_counts)
        for at, (_, one) in enumerate(found.histories):
            found.penalties.sizes[at] = one.size
        return found.penalties

    def _find_penalised(self, slots: Sequence[int]) -> "Penalised":
        histories = [(row, self._history[slot]) for row, slot in enumerate(slots) if slot in self._history]
        strengths = np.array([self._strengths[slots[row]] for row, _ in histories], dtype=np.float32).reshape(-1, 3)
        repetition, presence, frequency = (strengths[:, i].copy() for i in range(3))
        table = self._histories
        rows, firsts, sizes = np.array([(row, one.first, 0) for row, one in histories], dtype=np.int64).reshape(-1, 3).T
        penalties = PenaltyRows(
            rows.copy(), firsts.copy(), sizes.copy(), table.ids, table.counts, repetition, presence, frequency
        )
        return Penalised(list(slots), histories, penalties, table.num_moves)

    def biases(self, slots: Sequence[int]) -> LogitBiasRows | None:
        """Returns the logit biases of these slots, by row."""
        found = [(row, self._bias[slot]) for row, slot in enumerate(slots) if slot in self._bias]
        if not found:
            return None
        return LogitBiasRows(
            rows=np.concatenate([bias.rows + row for row, bias in found]),
            ids=np.concatenate([bias.ids for _, bias in found]),
            values=np.concatenate([bias.values for _, bias in found]),
        )

    def allowed(self, slots: Sequence[int]) -> AllowedTokenRows | None:
        """Returns the allowed tokens of these slots, by row."""
        if not self._allowed:
            return None
        return allow([(row, self._allowed[slot]) for row, slot in enumerate(slots) if slot in self._allowed])
