"""Narrows a row of logits to the few values that top-k and top-p may keep: counts them by magnitude, then gathers them.

Counts bound what can be kept: values are gathered of the bins up to the one where enough are counted. If there are few
rows, each is counted and gathered by several programs, in two launches, and otherwise by the program that goes on with
them. Both give the same values; their order differs, on which nothing depends. Mass is counted in integers
(e^x · 2^44), so that a sum is the same in any order.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.dependent import wait_for_inputs

# Of width 1/4 each. The last bin holds all values 31.75 or more below the peak, of mass e^-31.75 at most each.
BINS = tl.constexpr(128)
ONE = tl.constexpr(17592186044416.0)  # 2^44, so that the mass of 2^19 ids of weight 1 fits in int64


@triton.jit
def peak_of(peaks_ptr, row, SPLITS: tl.constexpr):
    """Returns the greatest logit of a row, +inf if it holds NaN or +inf, from peaks float32 [R, SPLITS]."""
    return tl.max(tl.load(peaks_ptr + row * SPLITS + tl.arange(0, SPLITS)), 0)


@triton.jit
def is_drawn(peak, temperature):
    """Returns whether the row's token is drawn at random: the row is neither bad nor greedy."""
    return (tl.abs(peak) < float("inf")) & (temperature > 0.0)


@triton.jit
def scaled(logits, peak, temperature):
    """Returns (logits - peak) / temperature, correctly rounded, so that kernels that compare with a floor agree."""
    return tl.div_rn(logits - peak, temperature)


@triton.jit
def weight(x, floor):
    """Returns e^x · 2^44 as an integer, 0 below the floor."""
    return tl.where(x >= floor, tl.exp(x) * ONE, 0.0).to(tl.int64)


@triton.jit
def tile_of(source, first, num, peak, temperature, TILE: tl.constexpr):
    """Returns the scaled values at places first … first + TILE - 1; -inf beyond `num`."""
    at = first + tl.arange(0, TILE)
    return scaled(tl.load(source + at, mask=at < num, other=float("-inf")), peak, temperature)


@triton.jit
def _bins(x):
    return tl.minimum(tl.abs(x) * 4.0, BINS - 1).to(tl.int32)


@triton.jit
def counted(source, vocab, peak, temperature, part, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Returns the number of values in each bin of a part of a row, int32 [BINS], and their mass."""
    counts = tl.zeros([BINS], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for first in range(part * TILE, vocab, PARTS * TILE):
        x = tile_of(source, first, vocab, peak, temperature, TILE)
        counts += tl.histogram(_bins(x), BINS, mask=first + tl.arange(0, TILE) < vocab)
        mass += weight(x, float("-inf"))
    return counts, tl.sum(mass, 0)


@triton.jit
def cut_of(counts, mass, top_k, top_p):
    """Returns the last bin that may hold kept values of a row, and the number of values up to it."""
    bins = tl.arange(0, BINS)
    through = tl.cumsum(counts, 0)
    most = counts.to(tl.float32) * tl.exp(bins.to(tl.float32) * -0.25)  # upper bound of a bin's mass
    behind = tl.cumsum(most, 0, reverse=True) - most
    budget = (1.0 - top_p) * (mass.to(tl.float32) * (0.999 / ONE))  # with a margin for rounding
    enough = tl.where(top_k > 0, through >= top_k, behind <= budget)
    cut = tl.min(tl.where(enough, bins, BINS - 1), 0)
    return cut, tl.sum(tl.where(bins <= cut, counts, 0), 0)


@triton.jit
def gather(source, vocab, peak, temperature, cut, target, part, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Writes the scaled values of a part of a row that are in the bins up to `cut` to `target`, in order."""
    base = tl.full((), 0, tl.int32)
    for first in range(part * TILE, vocab, PARTS * TILE):
        x = tile_of(source, first, vocab, peak, temperature, TILE)
        chosen = (_bins(x) <= cut) & (first + tl.arange(0, TILE) < vocab)
        places = base + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(target + places, x, mask=chosen)
        base += tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def counts_of(counts_ptr, masses_ptr, row, PARTS: tl.constexpr):
    """Returns what `count_kernel` counted of a row: int32 [PARTS, BINS], and the row's mass."""
    parts = tl.arange(0, PARTS)
    counts = tl.load(counts_ptr + (row * PARTS + parts[:, None]) * BINS + tl.arange(0, BINS)[None, :])
    return counts, tl.sum(tl.load(masses_ptr + row * PARTS + parts), 0)


@triton.jit
def truncation_of(top_k_ptr, top_p_ptr, row, vocab):
    """Returns a row's top-k, 0 where it keeps all, and top-p."""
    top_k = tl.load(top_k_ptr + row)
    return tl.where(top_k < vocab, top_k, 0), tl.load(top_p_ptr + row)


@triton.jit
def count_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R], 0 keeps all
    top_p_ptr,  # float32 [R]
    counts_ptr,  # int32 [R, SPLITS, BINS]
    masses_ptr,  # int64 [R, SPLITS]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Counts the values of one part of a row that top-k or top-p narrows. Grid: R, SPLITS."""
    wait_for_inputs(IS_DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature = peak_of(peaks_ptr, row, SPLITS), tl.load(temperature_ptr + row)
    top_k, top_p = truncation_of(top_k_ptr, top_p_ptr, row, vocab)
    if is_drawn(peak, temperature) & ((top_k > 0) | (top_p < 1.0)):
        counts, mass = counted(logits_ptr + row * stride, vocab, peak, temperature, part, SPLITS, TILE)
        own = row * SPLITS + part
        tl.store(counts_ptr + own * BINS + tl.arange(0, BINS), counts)
        tl.store(masses_ptr + own, mass)


@triton.jit
def gather_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R], 0 keeps all
    top_p_ptr,  # float32 [R]
    counts_ptr,  # int32 [R, SPLITS, BINS]
    masses_ptr,  # int64 [R, SPLITS]
    scratch_ptr,  # float32 [R, TILE]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Gathers what may be kept of one part of a row, behind what is gathered of the parts before. Grid: R, SPLITS."""
    wait_for_inputs(IS_DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature = peak_of(peaks_ptr, row, SPLITS), tl.load(temperature_ptr + row)
    top_k, top_p = truncation_of(top_k_ptr, top_p_ptr, row, vocab)
    if is_drawn(peak, temperature) & ((top_k > 0) | (top_p < 1.0)):
        counts, mass = counts_of(counts_ptr, masses_ptr, row, SPLITS)
        cut, found = cut_of(tl.sum(counts, 0), mass, top_k, top_p)
        if found <= TILE:
            is_before = (tl.arange(0, SPLITS) < part)[:, None] & (tl.arange(0, BINS) <= cut)[None, :]
            base = tl.sum(tl.sum(tl.where(is_before, counts, 0), 1), 0)
            target = scratch_ptr + row * TILE + base
            gather(logits_ptr + row * stride, vocab, peak, temperature, cut, target, part, SPLITS, TILE)
