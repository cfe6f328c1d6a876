"""One vectorised pass from logits to tokens for all rows of a step, whatever their parameters.

Rows that are greedy without exception take one argmax. Log probabilities are computed for the rows that ask only.
"""

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from engine.errors import ServiceError, constraint_lost, nothing_left
from engine.plan import TokenLogprob
from engine.sampling.logprobs import score
from engine.sampling.rows import Floats, Ints, SamplingRows
from kernels import ops
from kernels.sampling import Rows, greedy


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
    """Keeps nothing between steps: noise is a function of (seed, output, position, token id)."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledRows:
        """logits float32 [R, V], which it may overwrite; rows of R."""
        asked = rows.logprobs
        raw = None if asked is None else _take(logits, asked.rows, keeps=rows.is_adjusted)
        if rows.is_adjusted:
            _adjust(logits, rows)
        if not rows.temperature.any():
            chosen, best = greedy(logits)
            bad = [row for row, value in enumerate(best.tolist()) if not math.isfinite(value)]
        else:
            chosen, is_bad = ops.sample(logits, _tensors(rows, logits.device))
            bad = is_bad.nonzero()[:, 0].tolist()
        errors: dict[int, ServiceError] = {}
        if rows.is_adjusted and (bad or rows.masks is not None):
            errors = _errors(logits, rows, bad)
            bad = sorted(errors.keys() | bad)
        ids: list[int] = chosen.tolist()
        if asked is None or raw is None:
            return SampledRows(ids, bad, {}, errors)
        if bad:
            raw, asked = _take(raw, (~np.isin(asked.rows, bad)).nonzero()[0], keeps=False), asked.but(bad)
        at = asked.rows.tolist()
        return SampledRows(ids, bad, dict(zip(at, score(raw, [ids[row] for row in at], asked), strict=True)), errors)


def _take(logits: Tensor, rows: Ints, *, keeps: bool) -> Tensor:
    """These rows, ascending; `keeps`: the logits will be overwritten, and they must not."""
    if len(rows) == len(logits):
        return logits.clone() if keeps else logits
    return logits[torch.from_numpy(rows).to(logits.device)]


def _errors(logits: Tensor, rows: SamplingRows, bad: list[int]) -> dict[int, ServiceError]:
    """What requests did to fail: they left their grammar, or nothing that they allow. `logits` are adjusted."""
    masks = rows.masks
    restricted = {row for some in (rows.allowed, rows.barred, masks) if some is not None for row in some.rows.tolist()}
    empty = [row for row in bad if row in restricted and bool(logits[row].isneginf().all())]
    lost = masks.lost if masks is not None else ()
    return {row: nothing_left() for row in empty} | {row: constraint_lost() for row in lost}


def _adjust(logits: Tensor, rows: SamplingRows) -> None:
    """Grammars and bars first, then biases, then penalties, in place."""

    def on(values: "Ints | Floats") -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    for allowed in (rows.masks, rows.allowed):
        if allowed is not None and len(allowed.rows):
            ops.mask_(logits, on(allowed.rows), torch.from_numpy(allowed.bits).to(logits.device))
    if rows.barred is not None:
        ops.bar_(logits, on(rows.barred.rows), on(rows.barred.ids))
    if rows.biases is not None:
        ops.bias_(logits, on(rows.biases.rows), on(rows.biases.ids), on(rows.biases.values))
    if rows.penalties is not None:
        found = rows.penalties
        columns = (found.rows, found.ids, found.counts, found.repetition, found.presence, found.frequency)
        ops.penalise_(logits, *(on(column) for column in columns))


def _tensors(rows: SamplingRows, device: torch.device) -> Rows:
    truncation = (rows.top_k, rows.top_p, rows.min_p, rows.typical_p)
    columns = (rows.temperature, *truncation, rows.seed, rows.position, rows.output)
    return Rows(*(torch.from_numpy(column).to(device) for column in columns))
