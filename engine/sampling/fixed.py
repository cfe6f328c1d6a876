"""What is made once of parameters that stay from step to step: their tensors on the device.

Takes rows as arrays, gives what `kernels.ops.choose` takes. Knows no logits.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.logprobs import read, spans, want
from engine.sampling.rows import Allowed, KnobRows, Pairs, SamplingRows
from engine.sampling.rows import Penalties as PenaltyRows
from kernels.adjust import Bars, Biases, Changes, Mask, Penalties
from kernels.sampling import Rows
from kernels.scores import Scores


class Fixed:
    """Of `knobs`, for logits `vocab` wide."""

    def __init__(self, knobs: KnobRows, vocab: int, device: torch.device) -> None:
        self.knobs = knobs
        self._device = device
        truncation = (knobs.top_k, knobs.top_p, knobs.min_p, knobs.typical_p)
        columns = (knobs.temperature, *truncation, knobs.seed, knobs.seed, knobs.output)
        self._rows = Rows(*(self._on(column) for column in columns))  # positions are each step's own
        asked, biases = knobs.logprobs, knobs.biases
        self.wanted = None if asked is None else want(asked, vocab, device)
        self._at = [] if asked is None else asked.rows.tolist()
        self._spans = [] if asked is None or self.wanted is None else spans(self.wanted.nums.tolist(), asked.ids)
        self._biases = (
            None if biases is None else Biases(self._on(biases.rows), self._on(biases.ids), self._on(biases.values))
        )
        self._barred: tuple[Pairs, Bars] | None = None  # of the step before: often the same
        self._penalised: tuple[PenaltyRows, Penalties] | None = None  # likewise: it changes in place
        self._masks = () if knobs.allowed is None else (self._mask(knobs.allowed),)
        self._changes: Changes | None = None  # likewise

    def rows(self, position: "np.ndarray[Any, Any]") -> Rows:
        """The rows that sample tokens at these positions, int64 [R]."""
        return self._rows._replace(positions=self._on(position))

    def changes(self, rows: SamplingRows) -> Changes:
        """Of rows of these knobs: grammars and what is allowed first."""
        bars = None if rows.barred is None else self._bars(rows.barred)
        penalties = None if rows.penalties is None else self._penalties(rows.penalties)
        last = self._changes
        if rows.masks is not None:
            masks = (*self._masks, self._mask(rows.masks))
        elif last is not None and last.bars is bars and last.penalties is penalties and last.masks is self._masks:
            return last
        else:
            masks = self._masks
        self._changes = Changes(masks, bars, self._biases, penalties)
        return self._changes

    def read(self, scores: Scores) -> dict[int, TokenLogprob]:
        """Of the rows that asked."""
        return dict(zip(self._at, read(scores, self._spans), strict=True))

    def _bars(self, barred: Pairs) -> Bars:
        if self._barred is None or self._barred[0] is not barred:
            self._barred = barred, Bars(self._on(barred.rows), self._on(barred.ids))
        return self._barred[1]

    def _penalties(self, found: PenaltyRows) -> Penalties:
        if self._device.type != "cpu":
            return self._without_gaps(found)
        if self._penalised is None or self._penalised[0] is not found:
            on, entries = self._on, (found.firsts, found.sizes, found.ids, found.counts)
            columns = (found.rows, *entries, found.repetition, found.presence, found.frequency)
            self._penalised = found, Penalties(*(on(column) for column in columns))
        return self._penalised[1]

    def _without_gaps(self, found: PenaltyRows) -> Penalties:
        """As a device is to have it: only what is counted."""
        sizes, on = found.sizes, self._on
        at = np.concatenate([np.arange(first, first + size) for first, size in zip(found.firsts, sizes, strict=True)])
        entries = (on(np.cumsum(sizes) - sizes), on(sizes), on(found.ids[at]), on(found.counts[at]))
        return Penalties(on(found.rows), *entries, on(found.repetition), on(found.presence), on(found.frequency))

    def _mask(self, allowed: Allowed) -> Mask:
        return Mask(self._on(allowed.rows), self._on(allowed.bits))

    def _on(self, values: "np.ndarray[Any, Any]") -> Tensor:
        found = torch.from_numpy(values)
        return found if self._device.type == "cpu" else found.to(self._device)
