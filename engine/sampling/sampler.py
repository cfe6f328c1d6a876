"""One vectorised pass from logits to tokens for all rows of a step, whatever their parameters.

Rows that are greedy without exception take one argmax. Log probabilities are computed for the rows that ask only.
"""

import dataclasses
import math

import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.rows import Floats, Ints, SamplingRows
from kernels import adjust
from kernels.sampling import Rows, greedy, sample


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """Attributes:
    ids: the token of each row.
    bad: rows whose logits held no usable number, or whose grammar was lost; their id means nothing.
    logprobs: of the rows that asked.
    lost: the bad rows whose grammar was lost.
    """

    ids: list[int]
    bad: list[int]
    logprobs: dict[int, TokenLogprob]
    lost: frozenset[int] = frozenset()


class Sampler:
    """Keeps nothing between steps: noise is a function of (seed, output, position, token id)."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledRows:
        """logits float32 [R, V], which it may overwrite; rows of R."""
        raw = logits.clone() if rows.is_adjusted and rows.num_logprobs else logits
        if rows.is_adjusted:
            _adjust(logits, rows)
        if not rows.temperature.any():
            chosen, best = greedy(logits)
            bad = [row for row, value in enumerate(best.tolist()) if not math.isfinite(value)]
        else:
            chosen, is_bad = sample(logits, _tensors(rows, logits.device))
            bad = is_bad.nonzero()[:, 0].tolist()
        lost = rows.masks.lost if rows.masks is not None else frozenset()
        if lost:
            bad = sorted(lost.union(bad))
        ids: list[int] = chosen.tolist()
        logprobs = {row: _logprob(raw[row], ids[row], num) for row, num in rows.num_logprobs.items() if row not in bad}
        return SampledRows(ids, bad, logprobs, lost)


def _adjust(logits: Tensor, rows: SamplingRows) -> None:
    """Grammars and bars first, then biases, then penalties, in place."""

    def on(values: "Ints | Floats") -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    if rows.masks is not None and len(rows.masks.rows):
        adjust.mask_(logits, on(rows.masks.rows), torch.from_numpy(rows.masks.bits).to(logits.device))
    for row, allowed in rows.allowed.items():
        adjust.keep_only_(logits, row, on(allowed))
    for row, barred in rows.barred.items():
        adjust.bar_(logits, row, torch.tensor(barred, dtype=torch.int64, device=logits.device))
    if rows.biases is not None:
        adjust.add_(logits, on(rows.biases.rows), on(rows.biases.ids), on(rows.biases.values))
    if rows.penalties is not None:
        found = rows.penalties
        columns = (found.rows, found.ids, found.counts, found.repetition, found.presence, found.frequency)
        adjust.penalise_(logits, *(on(column) for column in columns))


def _tensors(rows: SamplingRows, device: torch.device) -> Rows:
    truncation = (rows.top_k, rows.top_p, rows.min_p, rows.typical_p)
    columns = (rows.temperature, *truncation, rows.seed, rows.position, rows.output)
    return Rows(*(torch.from_numpy(column).to(device) for column in columns))


def _logprob(logits: Tensor, token: int, num: int) -> TokenLogprob:
    """Natural-log probability of `token` under softmax(logits [V]), its rank, and the `num` most likely ids."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs[token]
    rank = 1 + int((logprobs > own).sum())
    top = logprobs.topk(num)
    return TokenLogprob(float(own), rank, tuple(top.indices.tolist()), tuple(top.values.tolist()))
