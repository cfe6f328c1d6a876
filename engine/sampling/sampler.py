"""One vectorised pass from logits to tokens for all rows of a step, whatever their parameters.

Log probabilities are computed for the rows that ask only.
"""

import dataclasses

import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError, constraint_lost, nothing_left
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.sampling.fixed import FixedRows
from sluice_server.engine.sampling.rows import SamplingParamRows, SamplingRows
from sluice_server.kernels import ops

MAX_KEPT = 32  # knobs: those of drafts of other lengths come in turns


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """Attributes:
    ids: the token of each row.
    bad: rows whose logits held no usable number, or whose grammar was lost; their id means nothing.
    logprobs: of the rows that asked.
    errors: of the bad rows whose request is at fault.
    """

    ids: list[int]
    bad: list[int]
    logprobs: dict[int, TokenLogprob]
    errors: dict[int, ServiceError] = dataclasses.field(default_factory=dict)


class Sampler:
    """Keeps nothing between steps but what it made of knobs that come again: noise is a function of (seed, output,
    position, token id)."""

    def __init__(self) -> None:
        self._fixed: dict[SamplingParamRows, FixedRows] = {}

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledRows:
        """logits float32 [R, V], which it may overwrite; rows of R."""
        fixed = self._fixed.get(rows.param_rows)
        if fixed is None:
            if len(self._fixed) >= MAX_KEPT:
                self._fixed.clear()
            fixed = self._fixed[rows.param_rows] = FixedRows(rows.param_rows, logits.shape[1], logits.device)
        chosen = ops.choose(logits, fixed.rows(rows.position), fixed.changes(rows), fixed.wanted)
        ids: list[int] = chosen.ids.tolist()
        bad = [row for row, token in enumerate(ids) if token < 0]
        errors: dict[int, ServiceError] = {}
        if (bad and rows.is_adjusted) or (rows.masks is not None and rows.masks.lost):
            errors = _errors(logits, rows, bad)
            bad = sorted(errors.keys() | bad)
        if chosen.scores is None:
            return SampledRows(ids, bad, {}, errors)
        logprobs = fixed.read(chosen.scores)
        if bad:
            logprobs = {row: one for row, one in logprobs.items() if row not in bad}
        return SampledRows(ids, bad, logprobs, errors)


def _errors(logits: Tensor, rows: SamplingRows, bad: list[int]) -> dict[int, ServiceError]:
    """What requests did to fail: they left their grammar, or nothing that they allow. `logits` are adjusted."""
    masks = rows.masks
    restrictions = (rows.param_rows.allowed, rows.banned, masks)
    restricted = {row for some in restrictions if some is not None for row in some.rows.tolist()}
    empty = [row for row in bad if row in restricted and bool(logits[row].isneginf().all())]
    lost = masks.lost if masks is not None else ()
    return {row: nothing_left() for row in empty} | {row: constraint_lost() for row in lost}
