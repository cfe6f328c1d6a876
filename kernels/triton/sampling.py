"""Samples one token for each row of logits on a CUDA device.

The reference implementation is `kernels.reference.sampling.sample`. Five launches, none of which waits for the host:
peaks, floors, bands of typical-p, Gumbel-max over the kept set, and its merge. Of a greedy row only peaks are read. If
there are few rows, each is split over several programs, and two launches before the floors count and gather what may be
kept. A row's token depends on that row alone, whatever the split: peaks and best scores are exact, and mass is summed
in integers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.triton.aot import SPILLED_BYTES, AotCase
from sluice_server.kernels.triton.dependent import dependent, wait_for_inputs
from sluice_server.kernels.triton.narrowing import BINS, count_kernel, gather_kernel, is_drawn, peak_of, scaled
from sluice_server.kernels.triton.noise import gumbel, uniform_words
from sluice_server.kernels.triton.truncation import band_kernel, floor_kernel

TILE = 4096  # values that a program processes at once
CALLS = 512  # Philox calls at once, for 4 ids each
WARPS = 8
ROW_WARPS = 32  # of a kernel with one program a row, which mostly waits for memory
FLOOR_WARPS = 16  # measured on an H200: a row takes 32 µs with 16 and 36 with 32
SPILLED = {"floor-64": 40}  # bytes that a case may spill beyond what all may: for sm_100, of the 64 registers it has
MAX_SPLITS = 64
MAX_VOCAB = 1 << 19  # see `truncation.ONE`
NO_ID = tl.constexpr(0x7FFFFFFF)  # larger than any id


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draws one id per row; see `kernels.reference.sampling.sample`.

    Args:
        logits: float32 [R, V], ids of a row contiguous, V up to `MAX_VOCAB`.
        rows: columns [R] on the device of `logits`.

    Returns:
        ids int64 [R], -1 for bad rows, and bad bool [R].

    Raises ValueError for other logits.
    """
    num, vocab = logits.shape
    if logits.dtype is not torch.float32 or logits.stride(1) != 1 or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype}: float32 rows of up to {MAX_VOCAB} ids wanted")
    temperature, top_k, top_p, min_p, typical_p, seeds, positions, outputs = (column.contiguous() for column in rows)
    splits, stride = splits_of(num, vocab), logits.stride(0)
    ids = torch.empty(num, dtype=torch.int64, device=logits.device)
    if not num:
        return ids, ids < 0
    peaks, scores = logits.new_empty(num, splits), logits.new_empty(num, splits)
    picks, lasts = torch.empty_like(peaks, dtype=torch.int32), torch.empty_like(ids)
    floors, centres, reaches = logits.new_empty(3, num)
    scratch = logits.new_empty(num, TILE)
    row = (logits, stride, vocab)
    chained = dependent(logits)
    peak_kernel[num, splits](*row, peaks, picks, splits, TILE, num_warps=WARPS, **chained)
    at = (peaks, temperature)
    counts = torch.empty(num, splits, BINS.value, dtype=torch.int32, device=logits.device)
    masses = torch.empty_like(peaks, dtype=torch.int64)
    if splits > 1:
        narrowed = (*row, *at, top_k, top_p, counts, masses)
        count_kernel[num, splits](*narrowed, splits, TILE, num_warps=WARPS, **chained)
        gather_kernel[num, splits](*narrowed, scratch, splits, TILE, num_warps=WARPS, **chained)
    kept = (top_k, top_p, min_p, counts, masses, scratch)
    floor_kernel[num,](*row, *at, *kept, floors, splits, TILE, num_warps=FLOOR_WARPS, **chained)
    bounds = (floors, centres, reaches, lasts)
    band_kernel[num,](*row, *at, typical_p, *bounds, splits, TILE, num_warps=ROW_WARPS, **chained)
    noise = (seeds, positions, outputs)
    draw_kernel[num, splits](*row, *at, *bounds, *noise, scores, picks, splits, CALLS, num_warps=WARPS, **chained)
    merge_kernel[num,](peaks, scores, picks, ids, splits, num_warps=1, **chained)
    return ids, ids < 0


def splits_of(num: int, vocab: int, programs: int = 264) -> int:
    """Returns the programs for each row, a power of two: enough to fill 132 multiprocessors twice, if rows are long."""
    wanted = min(-(-programs // max(num, 1)), -(-vocab // TILE), MAX_SPLITS)
    return 1 << (wanted - 1).bit_length()


@triton.jit
def peak_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    picks_ptr,  # int32 [R, SPLITS]
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the greatest logit of each part of a row and the lowest id that has it; +inf for a part that holds NaN."""
    wait_for_inputs(IS_DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # grid: R, SPLITS
    peak = tl.full([TILE], float("-inf"), tl.float32)
    pick = tl.full([TILE], NO_ID, tl.int32)
    for first in range(part * TILE, vocab, SPLITS * TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
        value = tl.where(value < float("inf"), value, float("inf"))
        pick = tl.where(value > peak, at, pick)  # ids ascend, so that the first of equals is kept
        peak = tl.maximum(peak, value)
    top = tl.max(peak, 0)
    tl.store(peaks_ptr + row * SPLITS + part, top)
    tl.store(picks_ptr + row * SPLITS + part, tl.min(tl.where(peak == top, pick, NO_ID), 0))


@triton.jit(
    do_not_specialize=["floors_ptr", "centres_ptr", "reaches_ptr"]
)  # otherwise a new value is compiled during a request
def draw_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    peaks_ptr,  # float32 [R, SPLITS]
    temperature_ptr,  # float32 [R]
    floors_ptr,  # float32 [R]
    centres_ptr,  # float32 [R]
    reaches_ptr,  # float32 [R]
    lasts_ptr,  # int64 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    outputs_ptr,  # int64 [R]
    scores_ptr,  # float32 [R, SPLITS]
    picks_ptr,  # int32 [R, SPLITS]; of a greedy row those of the peaks stay
    SPLITS: tl.constexpr,
    CALLS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Finds the best score of each part of a row and the lowest id that has it. Draws noise only where ids are kept."""
    wait_for_inputs(IS_DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # grid: R, SPLITS
    own = row * SPLITS + part
    peak, temperature = peak_of(peaks_ptr, row, SPLITS), tl.load(temperature_ptr + row)
    if is_drawn(peak, temperature):
        floor, last = tl.load(floors_ptr + row), tl.load(lasts_ptr + row)
        centre, reach = tl.load(centres_ptr + row), tl.load(reaches_ptr + row)
        seed, position, output = tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.load(outputs_ptr + row)
        best = tl.full([CALLS, 4], float("-inf"), tl.float32)
        pick = tl.full([CALLS, 4], NO_ID, tl.int32)
        for first in range(part * CALLS, tl.cdiv(vocab, 4), SPLITS * CALLS):
            calls = first + tl.arange(0, CALLS)
            at = calls[:, None] * 4 + tl.arange(0, 4)[None, :]
            logits = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
            x = scaled(logits, peak, temperature)
            away = tl.abs(x - centre)
            kept = (x >= floor) & (x > float("-inf")) & ((away < reach) | ((away == reach) & (at <= last)))
            if tl.max(tl.max(kept.to(tl.int32), 1), 0) > 0:
                score = x + gumbel(uniform_words(seed, position, output, calls))
                better = kept & (score > best)  # ids ascend, so that the first of equals is kept
                best = tl.where(better, score, best)
                pick = tl.where(better, at, pick)
        top = tl.max(tl.max(best, 1), 0)
        tl.store(scores_ptr + own, top)
        tl.store(picks_ptr + own, tl.min(tl.min(tl.where(best == top, pick, NO_ID), 1), 0))
    else:
        tl.store(scores_ptr + own, tl.load(peaks_ptr + own))


@triton.jit
def merge_kernel(
    peaks_ptr,  # float32 [R, SPLITS]
    scores_ptr,  # float32 [R, SPLITS]
    picks_ptr,  # int32 [R, SPLITS]
    ids_ptr,  # int64 [R]
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Chooses the best of a row's parts, the lowest id of equals; -1 for a row without a usable number."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # grid: R
    at = row * SPLITS + tl.arange(0, SPLITS)
    scores = tl.load(scores_ptr + at)
    pick = tl.min(tl.where(scores == tl.max(scores, 0), tl.load(picks_ptr + at), NO_ID), 0)
    is_usable = tl.abs(peak_of(peaks_ptr, row, SPLITS)) < float("inf")
    tl.store(ids_ptr + row, tl.where(is_usable, pick, -1).to(tl.int64))


def _case(name: str, kernel: Any, warps: int, **constants: int) -> AotCase:  # noqa: ANN401 # a kernel has no type
    floats = dict.fromkeys(
        ("logits_ptr", "peaks_ptr", "scores_ptr", "floors_ptr", "centres_ptr", "reaches_ptr"), "*fp32"
    )
    floats |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "typical_p_ptr", "scratch_ptr"), "*fp32")
    longs = dict.fromkeys(("top_k_ptr", "lasts_ptr", "seeds_ptr", "positions_ptr", "outputs_ptr", "ids_ptr"), "*i64")
    types = floats | longs | {"stride": "i64", "vocab": "i32", "picks_ptr": "*i32", "counts_ptr": "*i32"}
    types["masses_ptr"] = "*i64"
    own = {argument: types[argument] for argument in kernel.arg_names if argument in types}
    vectors = frozenset({"loads"} if "logits_ptr" in own else ())
    splits = constants["SPLITS"]
    name = f"{name}-{splits}"
    spilled, is_quick = SPILLED.get(name, SPILLED_BYTES), splits == 1
    return AotCase(
        f"sampling/{name}", kernel, own, constants, num_warps=warps, vectors=vectors, is_quick=is_quick, spilled=spilled
    )


CASES = tuple(
    case
    for splits in (1, 8, MAX_SPLITS)
    for case in (
        _case("peak", peak_kernel, WARPS, SPLITS=splits, TILE=TILE),
        *(
            _case(name, kernel, WARPS, SPLITS=splits, TILE=TILE)
            for name, kernel in (("count", count_kernel), ("gather", gather_kernel))
            if splits > 1
        ),
        _case("floor", floor_kernel, FLOOR_WARPS, SPLITS=splits, TILE=TILE),
        _case("band", band_kernel, ROW_WARPS, SPLITS=splits, TILE=TILE),
        _case("draw", draw_kernel, WARPS, SPLITS=splits, CALLS=CALLS),
        _case("merge", merge_kernel, 1, SPLITS=splits),
    )
)
