"""Finds what top-k, top-p, min-p and typical-p keep of a row, without sorting it: one program for each row.

Takes logits, their peaks and the sampling parameters. Returns for each row a floor (values not below it are kept) and
the band of typical-p. The kept set is that of `kernels.reference.sampling`: a floor is a value of the row, found by
bisection over the bits of floats. Mass is counted in integers (e^x · 2^44), so that a sum is the same in any order.

First a row is narrowed: one pass counts its values by magnitude, which bounds what can be kept, and a second one
gathers these values, usually few. If they are more than a tile, bisection reads the row itself.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.noise import log

# Of width 1/4 each. The last bin holds all values 31.75 or more below the peak, of mass e^-31.75 at most each.
BINS = tl.constexpr(128)
INF_KEY = tl.constexpr(0x7F800000)
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
    scratch_ptr,  # float32 [R, TILE]
    floors_ptr,  # float32 [R]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finds the least scaled logit that top-k, top-p and min-p keep of each row."""
    row = tl.program_id(0).to(tl.int64)  # grid: R
    peak = peak_of(peaks_ptr, row, SPLITS)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    top_k = tl.where(top_k < vocab, top_k, 0)
    floor = tl.where(min_p > 0.0, log(tl.maximum(min_p, 1e-37)), float("-inf"))
    if is_drawn(peak, temperature) & ((top_k > 0) | (top_p < 1.0)):
        source = logits_ptr + row * stride
        cut, found, mass = _narrow(source, vocab, peak, temperature, top_k, top_p, TILE)
        if found <= TILE:
            _gather(source, vocab, peak, temperature, cut, scratch_ptr + row * TILE, TILE)
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
):
    """Finds the locally typical set (Meister et al. 2022) of what a floor keeps.

    It consists of the ids whose scaled logit is less than `reach` away from `centre`, and of the ids exactly `reach`
    away up to id `last`. The surprise of x is (log mass - x), so that its distance from the entropy is that of x from
    the mean of x.
    """
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
def weight(x, floor):
    """Returns e^x · 2^44 as an integer, 0 below the floor."""
    return tl.where(x >= floor, tl.exp(x) * ONE, 0.0).to(tl.int64)


@triton.jit
def _tile(source, first, num, peak, temperature, TILE: tl.constexpr):
    """Returns the scaled values at places first … first + TILE - 1; -inf beyond `num`."""
    at = first + tl.arange(0, TILE)
    return scaled(tl.load(source + at, mask=at < num, other=float("-inf")), peak, temperature)


@triton.jit
def _bins(x):
    return tl.minimum(tl.abs(x) * 4.0, BINS - 1).to(tl.int32)


@triton.jit
def _narrow(source, vocab, peak, temperature, top_k, top_p, TILE: tl.constexpr):
    """Returns the last bin that may hold kept values, the number of values up to it, and the mass of the row."""
    counts = tl.zeros([BINS], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for first in range(0, vocab, TILE):
        x = _tile(source, first, vocab, peak, temperature, TILE)
        counts += tl.histogram(_bins(x), BINS, mask=first + tl.arange(0, TILE) < vocab)
        mass += weight(x, float("-inf"))
    total = tl.sum(mass, 0)
    bins = tl.arange(0, BINS)
    through = tl.cumsum(counts, 0)
    most = counts.to(tl.float32) * tl.exp(bins.to(tl.float32) * -0.25)  # upper bound of a bin's mass
    behind = tl.cumsum(most, 0, reverse=True) - most
    budget = (1.0 - top_p) * (total.to(tl.float32) * (0.999 / ONE))  # with a margin for rounding
    enough = tl.where(top_k > 0, through >= top_k, behind <= budget)
    cut = tl.min(tl.where(enough, bins, BINS - 1), 0)
    return cut, tl.sum(tl.where(bins <= cut, counts, 0), 0), total


@triton.jit
def _gather(source, vocab, peak, temperature, cut, target, TILE: tl.constexpr):
    """Writes the scaled values of the bins up to `cut` to `target`, in order."""
    base = tl.full((), 0, tl.int32)
    for first in range(0, vocab, TILE):
        x = _tile(source, first, vocab, peak, temperature, TILE)
        chosen = (_bins(x) <= cut) & (first + tl.arange(0, TILE) < vocab)
        places = base + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(target + places, x, mask=chosen)
        base += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of this program read the values


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
        x = _tile(source, first, num, peak, temperature, TILE)
        near = tl.abs(x - centre).to(tl.int32, bitcast=True) <= key
        total += tl.where(near, weight(x, floor), 0)
    return tl.sum(total, 0)


@triton.jit
def _mean(source, num, peak, temperature, floor, mass, TILE: tl.constexpr):
    """Returns the mean of the values not below the floor, weighted by their mass."""
    total = tl.zeros([TILE], tl.float64)
    for first in range(0, num, TILE):
        x = _tile(source, first, num, peak, temperature, TILE)
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
        x = _tile(source, first, num, peak, temperature, TILE)
        tied = tl.abs(x - centre).to(tl.int32, bitcast=True) == edge
        each = tl.where(tied, weight(x, floor), 0)
        kept = tied & (x >= floor) & (before + tl.cumsum(each, 0) - each < target)
        last = tl.maximum(last, tl.max(tl.where(kept, (first + tl.arange(0, TILE)).to(tl.int64), -1), 0))
        before += tl.sum(each, 0)
    return last
