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
from engine.sampling.rows import Bits, Floats, Ints, SamplingRows
from kernels import ops
from kernels.adjust import Bars, Biases, Changes, Mask, Penalties
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
    """Keeps nothing between steps but room: noise is a function of (seed, output, position, token id)."""

    def __init__(self) -> None:
        self._raw = torch.empty(
            0, 0
        )  # logits of rows that ask for log probabilities; new memory costs more than a copy

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledRows:
        """logits float32 [R, V], which it may overwrite; rows of R."""
        asked = rows.logprobs
        raw = None if asked is None else self._take(logits, asked.rows, keeps=rows.is_adjusted)
        if rows.is_adjusted:
            ops.adjust_(logits, _changes(rows, logits.device))
        ids, bad = _choose(logits, rows)
        errors: dict[int, ServiceError] = {}
        if rows.is_adjusted and (bad or rows.masks is not None):
            errors = _errors(logits, rows, bad)
            bad = sorted(errors.keys() | bad)
        if asked is None or raw is None:
            return SampledRows(ids, bad, {}, errors)
        if bad:
            raw, asked = raw[torch.from_numpy(~np.isin(asked.rows, bad)).to(raw.device)], asked.but(bad)
        at = asked.rows.tolist()
        return SampledRows(ids, bad, dict(zip(at, score(raw, [ids[row] for row in at], asked), strict=True)), errors)

    def _take(self, logits: Tensor, rows: Ints, *, keeps: bool) -> Tensor:
        """These rows, ascending; `keeps`: the logits will be overwritten, and they must not."""
        if len(rows) == len(logits) and not keeps:
            return logits
        if self._raw.device != logits.device or self._raw.shape[1:] != logits.shape[1:] or len(self._raw) < len(rows):
            self._raw = logits.new_empty(len(rows), logits.shape[1])
        return torch.index_select(logits, 0, torch.from_numpy(rows).to(logits.device), out=self._raw[: len(rows)])


def _choose(logits: Tensor, rows: SamplingRows) -> tuple[list[int], list[int]]:
    """The ids, and the rows without a usable number."""
    if rows.temperature.any():
        ids: list[int] = ops.sample(logits, _tensors(rows, logits.device))[0].tolist()
        return ids, [row for row, token in enumerate(ids) if token < 0]
    chosen, best = greedy(logits)
    return chosen.tolist(), [row for row, value in enumerate(best.tolist()) if not math.isfinite(value)]


def _errors(logits: Tensor, rows: SamplingRows, bad: list[int]) -> dict[int, ServiceError]:
    """What requests did to fail: they left their grammar, or nothing that they allow. `logits` are adjusted."""
    masks = rows.masks
    restricted = {row for some in (rows.allowed, rows.barred, masks) if some is not None for row in some.rows.tolist()}
    empty = [row for row in bad if row in restricted and bool(logits[row].isneginf().all())]
    lost = masks.lost if masks is not None else ()
    return {row: nothing_left() for row in empty} | {row: constraint_lost() for row in lost}


def _changes(rows: SamplingRows, device: torch.device) -> Changes:
    """As tensors: grammars and what is allowed first."""

    def on(values: "Ints | Floats | Bits") -> Tensor:
        return torch.from_numpy(values).to(device)

    masks = tuple([Mask(on(one.rows), on(one.bits)) for one in (rows.masks, rows.allowed) if one is not None])
    barred, biases, found, penalties = rows.barred, rows.biases, rows.penalties, None
    if found is not None:
        strengths = (on(found.repetition), on(found.presence), on(found.frequency))
        penalties = Penalties(on(found.rows), on(found.sizes), on(found.ids), on(found.counts), *strengths)
    return Changes(
        masks,
        None if barred is None else Bars(on(barred.rows), on(barred.ids)),
        None if biases is None else Biases(on(biases.rows), on(biases.ids), on(biases.values)),
        penalties,
    )


def _tensors(rows: SamplingRows, device: torch.device) -> Rows:
    truncation = (rows.top_k, rows.top_p, rows.min_p, rows.typical_p)
    columns = (rows.temperature, *truncation, rows.seed, rows.position, rows.output)
    return Rows(*(torch.from_numpy(column).to(device) for column in columns))
