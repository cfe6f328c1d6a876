"""Changes of single logits before sampling on a CUDA device; see the twins in `kernels.adjust`.

Pairs (row, id) are spread over programs, one thread each: a pair appears once in a list, or always gets the same value.
Masks take one program for each part of a row.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.aot import Case

PAIRS = 256  # of one program
WORDS = 64  # of a mask, 32 ids each


def penalise_(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Make ids that a sequence has less likely, in place; see `kernels.adjust.penalise_`."""
    if len(ids):
        columns = (rows, ids, counts, repetition, presence, frequency)
        penalise_kernel[triton.cdiv(len(ids), PAIRS),](logits, logits.stride(0), len(ids), *columns, PAIRS)


def bias_(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits [R, V] += values [N] at the pairs, in place."""
    if len(ids):
        bias_kernel[triton.cdiv(len(ids), PAIRS),](logits, logits.stride(0), len(ids), rows, ids, values, PAIRS)


def bar_(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Bar the ids of the pairs [N], in place; a pair may appear more than once."""
    if len(ids):
        bar_kernel[triton.cdiv(len(ids), PAIRS),](logits, logits.stride(0), len(ids), rows, ids, PAIRS)


def mask_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Bar the ids of `rows` whose bit is not set, in place; see `kernels.adjust.mask_`."""
    if len(rows):
        grid = (len(rows), triton.cdiv(bits.shape[1], WORDS))
        mask_kernel[grid](logits, logits.stride(0), logits.shape[1], rows, bits, bits.stride(0), bits.shape[1], WORDS)


@triton.jit
def penalise_kernel(
    logits_ptr,  # float32 [R, V], rows `stride` apart
    stride,
    num,
    rows_ptr,  # int64 [num]
    ids_ptr,  # int64 [num]
    counts_ptr,  # float32 [num]
    repetition_ptr,  # float32 [num]
    presence_ptr,  # float32 [num]
    frequency_ptr,  # float32 [num]
    PAIRS: tl.constexpr,
):
    """Grid: ⌈num / PAIRS⌉."""
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = at < num
    places = (
        logits_ptr + tl.load(rows_ptr + at, mask=mask, other=0) * stride + tl.load(ids_ptr + at, mask=mask, other=0)
    )
    found = tl.load(places, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + at, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + at, mask=mask, other=1.0)
    presence = tl.load(presence_ptr + at, mask=mask, other=0.0)
    frequency = tl.load(frequency_ptr + at, mask=mask, other=0.0)
    found = tl.where(found > 0, tl.div_rn(found, repetition), found * repetition)
    found -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(places, found, mask=mask)


@triton.jit
def bias_kernel(
    logits_ptr,  # float32 [R, V], rows `stride` apart
    stride,
    num,
    rows_ptr,  # int64 [num]
    ids_ptr,  # int64 [num]
    values_ptr,  # float32 [num]
    PAIRS: tl.constexpr,
):
    """Grid: ⌈num / PAIRS⌉."""
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = at < num
    places = (
        logits_ptr + tl.load(rows_ptr + at, mask=mask, other=0) * stride + tl.load(ids_ptr + at, mask=mask, other=0)
    )
    found = tl.load(places, mask=mask, other=0.0)
    tl.store(places, found + tl.load(values_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def bar_kernel(
    logits_ptr,  # float32 [R, V], rows `stride` apart
    stride,
    num,
    rows_ptr,  # int64 [num]
    ids_ptr,  # int64 [num]
    PAIRS: tl.constexpr,
):
    """Grid: ⌈num / PAIRS⌉."""
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = at < num
    places = (
        logits_ptr + tl.load(rows_ptr + at, mask=mask, other=0) * stride + tl.load(ids_ptr + at, mask=mask, other=0)
    )
    tl.store(places, tl.full([PAIRS], float("-inf"), tl.float32), mask=mask)


@triton.jit
def mask_kernel(
    logits_ptr,  # float32 [R, vocab], rows `stride` apart
    stride,
    vocab,
    rows_ptr,  # int64 [M]
    bits_ptr,  # int32 [M, width], rows `bits_stride` apart
    bits_stride,
    width,
    WORDS: tl.constexpr,
):
    """Grid: M, ⌈width / WORDS⌉. Only barred logits are written."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + at)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bits_ptr + at * bits_stride + words, mask=words < width, other=-1)
    lane = tl.arange(0, 32)
    ids = words[:, None] * 32 + lane[None, :]
    is_barred = ((bits[:, None] >> lane[None, :]) & 1) == 0
    places = logits_ptr + row * stride + ids
    tl.store(places, tl.full([WORDS, 32], float("-inf"), tl.float32), mask=is_barred & (ids < vocab))


def _case(name: str, kernel: Any, **constants: int) -> Case:  # noqa: ANN401 # a kernel has no type
    types = dict.fromkeys(("logits_ptr", "counts_ptr", "repetition_ptr", "presence_ptr"), "*fp32")
    types |= dict.fromkeys(("frequency_ptr", "values_ptr"), "*fp32") | dict.fromkeys(("rows_ptr", "ids_ptr"), "*i64")
    types |= {"bits_ptr": "*i32"} | dict.fromkeys(("stride", "bits_stride"), "i64") | {"num": "i32"}
    types |= dict.fromkeys(("vocab", "width"), "i32")
    own = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    return Case(f"adjust/{name}", kernel, own, constants, frozenset({"num"} & own.keys()), vectors=NO_VECTORS)


NO_VECTORS: frozenset[str] = frozenset()  # a thread has a pair or a word
CASES = (
    _case("penalise", penalise_kernel, PAIRS=PAIRS),
    _case("bias", bias_kernel, PAIRS=PAIRS),
    _case("bar", bar_kernel, PAIRS=PAIRS),
    _case("mask", mask_kernel, WORDS=WORDS),
)
