"""Samples one token for each row of logits: the reference implementation of the sampling kernel, and its fallback.

Takes logits and parameters of each row; returns ids and which rows hold no usable number. A row's result depends on
that row alone: no operation here mixes rows, and the noise comes from `kernels.reference.philox`. Sampling is
Gumbel-max over the kept set. The kept set is `scaled logit >= floor` with one floor for each row, so that ties at the
boundary are all kept; typical-p then keeps a band of it. Independent of requests.

Batch-invariant to the bit on CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sluice_server.kernels.reference.philox import GUMBEL_MAX, gumbel, row_uniforms, uniforms

# Numbers of candidates tried before the whole row (151,936 ids, one row: topk(64) 0.05-0.5 ms, sort 13 ms).
FEW, MANY = 64, 1024
# At or below this temperature, FEW candidates often decide an untruncated row: their scaled logits span more than 23.
_COLD = 0.5


class Rows(NamedTuple):
    """Sampling parameters of R rows, [R] each; see `sample`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    seeds: Tensor
    positions: Tensor
    outputs: Tensor

    def take(self, rows: Tensor) -> "Rows":
        """Returns the rows at these indices, int64 [N]."""
        return self if len(rows) == len(self.seeds) else Rows(*(column[rows] for column in self))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the most likely ids, the lowest id on ties.

    Args:
        logits: float32 [R, V].

    Returns:
        ids int64 [R] and the logits there, float32 [R]: not finite exactly where the row holds NaN, +inf or only -inf.
    """
    ids = _argmax(logits)
    return ids, logits.gather(1, ids[:, None])[:, 0]


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draws one id per row. Truncation is in Hugging Face's order: temperature, top-k, top-p, min-p, typical-p.

    Args:
        logits: float32 [R, V]; ids with -inf are never drawn.
        rows: temperature float32 (0 is greedy), top_k int64 (0 keeps all), top_p, min_p and typical_p float32, seeds
            int64 (two's complement of the unsigned seed), positions and outputs int64; all [R] and on the device of
            `logits`.

    Returns:
        ids int64 [R], and bad bool [R]: rows with NaN, +inf or only -inf, whose id is -1.
    """
    if not rows.temperature.any():
        ids, best = greedy(logits)
        bad = ~torch.isfinite(best)
        return ids.masked_fill(bad, -1), bad
    peak = logits.amax(1)
    bad = ~torch.isfinite(peak)
    ids = torch.full_like(rows.positions, -1)
    certain = _where(~bad & (rows.temperature <= 0))
    if len(certain):
        ids[certain] = _argmax(_take(logits, certain))
    drawn = _where(~bad & (rows.temperature > 0))
    if len(drawn):
        own = rows.take(drawn)
        # the peak becomes 0: no temperature overflows, and every floor is relative to it
        scaled = (_take(logits, drawn) - peak[drawn, None]).div_(own.temperature[:, None])
        ids[drawn] = _draw(scaled, own)
    return ids, bad


def _draw(scaled: Tensor, rows: Rows) -> Tensor:
    """Draws ids [R] from scaled logits [R, V] whose maximum is 0, using few candidates where they suffice."""
    vocab = scaled.shape[1]
    rows = rows._replace(top_k=rows.top_k.where(rows.top_k < vocab, 0))
    ids = torch.full_like(rows.positions, -1)
    narrow = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.temperature <= _COLD)
    narrow &= rows.typical_p >= 1  # typical-p needs the entropy of the whole kept set
    left = _where(narrow)
    first = max(FEW, int(rows.top_k.max()) + 1)
    for width in (min(first, MANY), MANY):
        if len(left) == 0 or width >= vocab:
            break
        found, sure = from_candidates(_take(scaled, left), rows.take(left), width)
        ids[left] = found.where(sure, -1)
        left = left[~sure]
    left = _where(ids < 0)
    if len(left):
        ids[left] = from_whole_row(_take(scaled, left), rows.take(left))
    return ids


def from_candidates(scaled: Tensor, rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """Draws from each row's `width` most likely ids.

    Args:
        scaled: float32 [R, V], each row's maximum 0.
        width: number of candidates, below V.

    Returns:
        ids int64 [R], and sure bool [R]: whether the whole row would give the same id.
    """
    top, top_ids = scaled.topk(width, dim=1)  # [R, width], descending
    floor, holds_k = _state(scaled, top, rows)
    score = gumbel(uniforms(rows.seeds, rows.positions, rows.outputs, top_ids)).add_(top)
    score.masked_fill_(top < floor, -torch.inf)
    best = score.amax(1, keepdim=True)
    ids = top_ids.where(score == best, scaled.shape[1]).amin(1)
    # sure if the ids left out are below the floor, or could not win even with the largest possible noise
    sure = (top[:, -1:] < torch.maximum(floor, best - GUMBEL_MAX)) & holds_k
    return ids, sure[:, 0]


def from_whole_row(scaled: Tensor, rows: Rows) -> Tensor:
    """Draws from all ids: int64 [R]. `scaled` is float32 [R, V], each row's maximum 0."""
    floor = rows.min_p.log()[:, None]
    ranked = _where((rows.top_k > 0) | (rows.top_p < 1))
    if len(ranked):
        part = _take(scaled, ranked)
        floor[ranked] = _state(part, part.sort(dim=1, descending=True).values, rows.take(ranked))[0]
    score = gumbel(row_uniforms(rows.seeds, rows.positions, rows.outputs, scaled.shape[1])).add_(scaled)
    score.masked_fill_(scaled < floor, -torch.inf)
    typical = _where(rows.typical_p < 1)
    if len(typical):
        kept = _take(scaled, typical).masked_fill(_take(scaled, typical) < _take(floor, typical), -torch.inf)
        score[typical] = _take(score, typical).masked_fill(~_typical(kept, rows.take(typical)), -torch.inf)
    return _argmax(score)


def _typical(scaled: Tensor, rows: Rows) -> Tensor:
    """Returns the locally typical set (Meister et al. 2022), bool [R, V].

    These are the ids whose surprise is nearest to the row's entropy, until their mass reaches typical_p. Ids at -inf
    are never in the set. Sums are in float64 and in order.
    """
    logs = scaled.log_softmax(1)
    weights = logs.exp()
    entropy = -(weights * logs.masked_fill(weights == 0, 0.0)).double().cumsum(1)[:, -1:]
    distance = (-logs.double() - entropy).abs()  # inf where an id is not kept
    order = distance.argsort(dim=1, stable=True)
    mass = weights.gather(1, order).double().cumsum(1)
    # Keeps the ids with a mass below p before them, so that the id at which the mass reaches p is kept too.
    within = (mass - weights.gather(1, order) < rows.typical_p[:, None]) & torch.isfinite(distance.gather(1, order))
    return torch.zeros_like(within).scatter_(1, order, within)


def _state(scaled: Tensor, top: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns the lowest scaled logit that each row keeps, [R, 1], and whether the candidates suffice for top-k.

    Computed from the row's most likely values `top` [R, K], descending. The floor is correct if it is above top[:, -1]
    or K is V, and if the second result, bool [R, 1], holds: `top` contains all that top-k keeps, which top-p needs for
    the mass of the kept set.
    """
    top_k = rows.top_k[:, None]
    kth = top.gather(1, (top_k - 1).clamp_(0, top.shape[1] - 1))
    floor = kth.where(top_k > 0, -torch.inf)
    holds_k = (top_k == 0) | (kth > top[:, -1:])
    narrows = rows.top_p[:, None] < 1
    if bool(narrows.any()):
        floor = torch.maximum(floor, _nucleus_floor(scaled, top, floor, rows).where(narrows, -torch.inf))
    return torch.maximum(floor, rows.min_p.log()[:, None]), holds_k


def _nucleus_floor(scaled: Tensor, top: Tensor, floor: Tensor, rows: Rows) -> Tensor:
    """Returns the last value of `top` before which less than top_p of the mass at or above `floor` lies, [R, 1].

    Sums are in float64 and in order, so that a prefix of a row sums to the same bits as in the whole row.
    """
    weight = top.exp().masked_fill_(top < floor, 0.0).double()
    through = weight.cumsum(1)
    mass = through[:, -1:]
    is_open = rows.top_k[:, None] == 0
    if bool(is_open.any()):
        # softmax handles rows one by one whatever the batch, which a plain sum over [R, V] does not
        mass = scaled.softmax(1).amax(1, keepdim=True).reciprocal_().double().where(is_open, mass)
    kept = (through - weight < rows.top_p[:, None] * mass).sum(1, keepdim=True)
    return top.gather(1, (kept - 1).clamp_(min=0))


def _argmax(values: Tensor) -> Tensor:
    """Returns the first index of each row's maximum, or of its first NaN: int64 [R] of float32 [R, V]."""
    if values.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: 29 us against 380 us for 32 x 8,192
        return torch.from_numpy(values.numpy().argmax(1))
    return values.argmax(1)


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values if len(rows) == len(values) else values[rows]
