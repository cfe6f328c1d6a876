"""Device tensors of sampling parameters that stay from step to step; they are made once.

Takes rows as arrays and gives the arguments of `kernels.ops.choose`; logits are not used.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.sampling.logprobs import read, spans, want
from sluice_server.engine.sampling.rows import AllowedTokenRows, SamplingParamRows, SamplingRows, TokenPairs
from sluice_server.engine.sampling.rows import PenaltyRows as PenaltyRows
from sluice_server.engine.uploads import uploaded
from sluice_server.kernels.reference.adjust import BannedTokens, LogitAdjustments, LogitBiases, Penalties, TokenMask
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import Scores


class FixedRows:
    """The tensors of `param_rows`, for logits of width `vocab`."""

    def __init__(self, param_rows: SamplingParamRows, vocab: int, device: torch.device) -> None:
        self.param_rows = param_rows
        self._device = device
        truncation = (param_rows.top_k, param_rows.top_p, param_rows.min_p, param_rows.typical_p)
        columns = (param_rows.temperature, *truncation, param_rows.seed, param_rows.seed, param_rows.output)
        self._rows = Rows(*(self._on(column) for column in columns))  # positions are replaced in each step
        asked, biases = param_rows.logprobs, param_rows.biases
        self.wanted = None if asked is None else want(asked, vocab, device)
        self._at = [] if asked is None else asked.rows.tolist()
        self._spans = [] if asked is None or self.wanted is None else spans(self.wanted.nums.tolist(), asked.ids)
        self._biases = (
            None
            if biases is None
            else LogitBiases(self._on(biases.rows), self._on(biases.ids), self._on(biases.values))
        )
        # Arguments and tensors of the step before, often reused.
        self._banned: tuple[TokenPairs, BannedTokens] | None = None
        self._penalised: tuple[PenaltyRows, Penalties] | None = None  # likewise; updated in place
        self._masks = () if param_rows.allowed is None else (self._mask(param_rows.allowed),)
        self._changes: LogitAdjustments | None = None  # likewise: adjustments of the step before

    def rows(self, position: "np.ndarray[Any, Any]") -> Rows:
        """Returns the rows that sample tokens at these positions, int64 [R]."""
        return self._rows._replace(positions=self._on(position))

    def changes(self, rows: SamplingRows) -> LogitAdjustments:
        """Returns the logit adjustments of rows with these parameters.

        Masks of grammars and allowed tokens come first.
        """
        banned_tokens = None if rows.banned is None else self._banned_tokens(rows.banned)
        penalties = None if rows.penalties is None else self._penalties(rows.penalties)
        last = self._changes
        if rows.masks is not None:
            masks = (*self._masks, self._mask(rows.masks))
        elif (
            last is not None
            and last.banned_tokens is banned_tokens
            and last.penalties is penalties
            and last.masks is self._masks
        ):
            return last
        else:
            masks = self._masks
        self._changes = LogitAdjustments(masks, banned_tokens, self._biases, penalties)
        return self._changes

    def read(self, scores: Scores) -> dict[int, TokenLogprob]:
        """Returns the log probabilities, by row that requested them."""
        return dict(zip(self._at, read(scores, self._spans), strict=True))

    def _banned_tokens(self, banned: TokenPairs) -> BannedTokens:
        if self._banned is None or self._banned[0] is not banned:
            self._banned = banned, BannedTokens(self._on(banned.rows), self._on(banned.ids))
        return self._banned[1]

    def _penalties(self, found: PenaltyRows) -> Penalties:
        if self._device.type != "cpu":
            return self._without_gaps(found)
        if self._penalised is None or self._penalised[0] is not found:
            on, entries = self._on, (found.firsts, found.sizes, found.ids, found.counts)
            columns = (found.rows, *entries, found.repetition, found.presence, found.frequency)
            self._penalised = found, Penalties(*(on(column) for column in columns))
        return self._penalised[1]

    def _without_gaps(self, found: PenaltyRows) -> Penalties:
        """Returns the penalties with entries packed without gaps, as devices need them."""
        sizes, on = found.sizes, self._on
        at = np.concatenate([np.arange(first, first + size) for first, size in zip(found.firsts, sizes, strict=True)])
        entries = (on(np.cumsum(sizes) - sizes), on(sizes), on(found.ids[at]), on(found.counts[at]))
        return Penalties(on(found.rows), *entries, on(found.repetition), on(found.presence), on(found.frequency))

    def _mask(self, allowed: AllowedTokenRows) -> TokenMask:
        return TokenMask(self._on(allowed.rows), self._on(allowed.bits))

    def _on(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return uploaded(values, self._device)
