"""Finds what top-k, top-p, min-p and typical-p keep of a row, without sorting it: one program for each row.

Takes logits, their peaks and the sampling parameters. Returns for each row a floor (values not below it are kept) and
the band of typical-p. The kept set is that of `kernels.reference.sampling`: a floor is a value of the row, found by
bisection over the bits of floats. First a row is narrowed to the values that can be kept (`narrowing`), usually few:
then each is compared with each. If they are more than a tile, bisection reads the row itself.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.dependent import wait_for_inputs
from sluice_server.kernels.triton.narrowing import (
    ONE,
    counted,
    counts_of,
    cut_of,
    gather,
    is_drawn,
    peak_of,
    tile_of,
    truncation_of,
    weight,
)
from sluice_server.kernels.triton.noise import log

INF_KEY = tl.constexpr(0x7F800000)
FEW = tl.constexpr(256)  # gathered values that are compared each with each; of more, a floor is found by bisection
COMPARED = tl.constexpr(32)  # with so many at once


@triton.jit(do_not_specialize=["floors_ptr"])  # otherwise a new value is compiled during a request
def floor_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R], 0 keeps all
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    counts_ptr,  # int32 [R, SPLITS, BINS]; unused with one split
    masses_ptr,  # int64 [R, SPLITS]; unused with one split
    scratch_ptr,  # float32 [R, TILE], gathered already if there are several splits
    floors_ptr,  # float32 [R]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the least scaled logit that top-k, top-p and min-p keep of each row."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # grid: R
    peak = peak_of(peaks_ptr, row, SPLITS)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = truncation_of(top_k_ptr, top_p_ptr, row, vocab)
    min_p = tl.load(min_p_ptr + row)
    floor = tl.where(min_p > 0.0, log(tl.maximum(min_p, 1e-37)), float("-inf"))
    if is_drawn(peak, temperature) & ((top_k > 0) | (top_p < 1.0)):
        source = logits_ptr + row * stride
        if SPLITS == 1:
            counts, mass = counted(source, vocab, peak, temperature, 0, 1, TILE)
        else:
            each, mass = counts_of(counts_ptr, masses_ptr, row, SPLITS)
            counts = tl.sum(each, 0)
        cut, found = cut_of(counts, mass, top_k, top_p)
        if found <= TILE:
            if SPLITS == 1:
                gather(source, vocab, peak, temperature, cut, scratch_ptr + row * TILE, 0, 1, TILE)
                tl.debug_barrier()  # other threads of this program read the values
            if found <= FEW:
                kept = _floor_of_few(scratch_ptr + row * TILE, found, mass, top_k, top_p)
            else:
                kept = _floor_of_tile(scratch_ptr + row * TILE, found, mass, top_k, top_p, TILE)
        else:
            kept = _floor_of_row(source, vocab, peak, temperature, mass, top_k, top_p, TILE)
        floor = tl.maximum(floor, kept)
    tl.store(floors_ptr + row, floor)


@triton.jit(
    do_not_specialize=["floors_ptr", "centres_ptr", "reaches_ptr"]
)  # otherwise a new value is compiled during a request
def band_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    temperature_ptr,  # float32 [R]
    typical_p_ptr,  # float32 [R]
    floors_ptr,  # float32 [R]
    centres_ptr,  # float32 [R]
    reaches_ptr,  # float32 [R]
    lasts_ptr,  # int64 [R]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the locally typical set (Meister et al. 2022) of what a floor keeps.

    It consists of the ids whose scaled logit is less than `reach` away from `centre`, and of the ids exactly `reach`
    away up to id `last`. The surprise of x is (log mass - x), so that its distance from the entropy is that of x from
    the mean of x.
    """
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # grid: R
    peak = peak_of(peaks_ptr, row, SPLITS)
    temperature = tl.load(temperature_ptr + row)
    typical_p = tl.load(typical_p_ptr + row)
    centre = tl.full((), 0.0, tl.float32)
    reach = tl.full((), float("inf"), tl.float32)
    last = row * 0 + vocab
    if is_drawn(peak, temperature) & (typical_p < 1.0):
        source = logits_ptr + row * stride
        floor = tl.load(floors_ptr + row)
        mass = _mass(source, vocab, peak, temperature, floor, 0.0, INF_KEY, TILE)
        centre = _mean(source, vocab, peak, temperature, floor, mass, TILE)
        target = share_of(mass, typical_p)
        reach = _reach(source, vocab, peak, temperature, floor, centre, target, True, TILE)
        edge = reach.to(tl.int32, bitcast=True)
        within = _mass(source, vocab, peak, temperature, floor, centre, edge - 1, TILE)
        last = _last_tie(source, vocab, peak, temperature, floor, centre, edge, target - within, TILE)
    tl.store(centres_ptr + row, centre)
    tl.store(reaches_ptr + row, reach)
    tl.store(lasts_ptr + row, last)


@triton.jit
def share_of(mass, share):
    """Returns `share` of a mass, rounded up to an integer, at least 1."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _floor_of_tile(values_ptr, num, mass, top_k, top_p, TILE: tl.constexpr):
    """Returns the floor that top-k and top-p set, from the gathered values. `mass` is that of the row."""
    at = tl.arange(0, TILE)
    x = tl.load(values_ptr + at, mask=at < num, other=float("-inf"))
    keys = tl.abs(x).to(tl.int32, bitcast=True)
    kept = tl.full((), float("-inf"), tl.float32)
    if top_k > 0:
        kept = -_least(keys, (at < num).to(tl.int64), top_k)
        mass = tl.sum(weight(x, kept), 0)
    if top_p < 1.0:
        kept = -_least(keys, weight(x, kept), share_of(mass, top_p))
    return kept


@triton.jit
def _floor_of_few(values_ptr, num, mass, top_k, top_p):
    """Returns what `_floor_of_tile` does, of at most FEW gathered values, without 31 rounds for each floor."""
    kept = tl.full((), float("-inf"), tl.float32)
    if top_k > 0:
        kept = -_least_of_few(values_ptr, num, kept, top_k, False)
        at = tl.arange(0, FEW)
        mass = tl.sum(weight(tl.load(values_ptr + at, mask=at < num, other=float("-inf")), kept), 0)
    if top_p < 1.0:
        kept = -_least_of_few(values_ptr, num, kept, share_of(mass, top_p), True)
    return kept


@triton.jit
def _floor_of_row(source, num, peak, temperature, mass, top_k, top_p, TILE: tl.constexpr):
    """Returns the floor that top-k and top-p set, from the row itself."""
    kept = tl.full((), float("-inf"), tl.float32)
    if top_k > 0:
        kept = -_reach(source, num, peak, temperature, kept, 0.0, top_k, False, TILE)
        mass = _mass(source, num, peak, temperature, kept, 0.0, INF_KEY, TILE)
    if top_p < 1.0:
        kept = -_reach(source, num, peak, temperature, kept, 0.0, share_of(mass, top_p), True, TILE)
    return kept


@triton.jit
def _least(keys, weights, target):
    """Returns the least key up to which the weights add up to `target`, as a float; infinite if they do not."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), INF_KEY, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(keys <= middle, weights, 0), 0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _least_of_few(values_ptr, num, floor, target, BY_MASS: tl.constexpr):
    """Returns the least distance from 0 of a value up to which the values reach `target`, counted as in `_reach`."""
    at = tl.arange(0, FEW)
    keys = tl.abs(tl.load(values_ptr + at, mask=at < num, other=float("-inf"))).to(tl.int32, bitcast=True)
    total = tl.zeros([FEW, COMPARED], tl.int64 if BY_MASS else tl.int32)
    for first in range(0, num, COMPARED):
        others = first + tl.arange(0, COMPARED)
        x = tl.load(values_ptr + others, mask=others < num, other=float("-inf"))
        near = tl.abs(x).to(tl.int32, bitcast=True)[None, :] <= keys[:, None]
        each = weight(x, floor) if BY_MASS else (others < num).to(tl.int32)
        total += tl.where(near, each[None, :], 0)
    reached = (tl.sum(total, 1) >= target) & (at < num)
    return tl.min(tl.where(reached, keys, INF_KEY), 0).to(tl.float32, bitcast=True)


@triton.jit
def _reach(source, num, peak, temperature, floor, centre, target, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Returns the least distance from `centre` within which the values not below the floor reach `target`.

    They are counted by mass with BY_MASS, else by number. Infinite if all of them together do not reach it.
    """
    low = tl.full((), 0, tl.int32)
    high = tl.full((), INF_KEY, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        total = tl.full([TILE], 0, tl.int64)
        for first in range(0, num, TILE):  # inlines `_tile` and `weight`, as calls take most of the interpreter's time
            at = first + tl.arange(0, TILE)
            logits = tl.load(source + at, mask=at < num, other=float("-inf"))
            x = tl.div_rn(logits - peak, temperature)
            near = (tl.abs(x - centre).to(tl.int32, bitcast=True) <= middle) & (at < num) & (x >= floor)
            total += tl.where(near, tl.exp(x) * ONE if BY_MASS else 1.0, 0.0).to(tl.int64)
        reached = tl.sum(total, 0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _mass(source, num, peak, temperature, floor, centre, key, TILE: tl.constexpr):
    """Returns the mass of the values not below the floor whose distance from `centre` has bits up to `key`."""
    total = tl.zeros([TILE], tl.int64)
    for first in range(0, num, TILE):
        x = tile_of(source, first, num, peak, temperature, TILE)
        near = tl.abs(x - centre).to(tl.int32, bitcast=True) <= key
        total += tl.where(near, weight(x, floor), 0)
    return tl.sum(total, 0)


@triton.jit
def _mean(source, num, peak, temperature, floor, mass, TILE: tl.constexpr):
    """Returns the mean of the values not below the floor, weighted by their mass."""
    total = tl.zeros([TILE], tl.float64)
    for first in range(0, num, TILE):
        x = tile_of(source, first, num, peak, temperature, TILE)
        each = weight(x, floor)
        total += each.to(tl.float64) * tl.where(each > 0, x, 0.0).to(tl.float64)
    return (tl.sum(total, 0) / mass.to(tl.float64)).to(tl.float32)


@triton.jit
def _last_tie(source, num, peak, temperature, floor, centre, edge, target, TILE: tl.constexpr):
    """Returns the last kept id of those whose distance has the bits `edge`: by id, until their mass reaches
    `target`."""
    before = tl.full((), 0, tl.int64)
    last = tl.full((), -1, tl.int64)
    for first in range(0, num, TILE):
        x = tile_of(source, first, num, peak, temperature, TILE)
        tied = tl.abs(x - centre).to(tl.int32, bitcast=True) == edge
        each = tl.where(tied, weight(x, floor), 0)
        kept = tied & (x >= floor) & (before + tl.cumsum(each, 0) - each < target)
        last = tl.maximum(last, tl.max(tl.where(kept, (first + tl.arange(0, TILE)).to(tl.int64), -1), 0))
        before += tl.sum(each, 0)
    return last
