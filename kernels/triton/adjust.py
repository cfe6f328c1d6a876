"""Changes single logits before sampling on a CUDA device; reference implementation in `kernels.reference.adjust`.

Pairs (row, id) are spread over programs, one thread each: a pair appears once in a list, or always gets the same value.
Masks use one program for each part of a row. Each kind of change is one launch, in the order of the reference
implementation.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.adjust import BannedTokens, LogitAdjustments, LogitBiases, Penalties, TokenMask
from sluice_server.kernels.triton.aot import AotCase

PAIRS = 256  # of one program
WORDS = 64  # of a mask, 32 ids each


def adjust_(logits: Tensor, changes: LogitAdjustments) -> None:
    """Changes logits float32 [R, V], ids of a row contiguous, in place; see `kernels.reference.adjust.adjust_`."""
    for mask in changes.masks:
        _mask(logits, mask)
    if changes.banned_tokens is not None:
        _bar(logits, changes.banned_tokens)
    if changes.biases is not None:
        _bias(logits, changes.biases)
    if changes.penalties is not None:
        _penalise(logits, changes.penalties)


def _mask(logits: Tensor, mask: TokenMask) -> None:
    if len(mask.rows):
        bits, width = mask.bits.contiguous(), mask.bits.shape[1]
        grid = (len(mask.rows), triton.cdiv(width, WORDS))
        mask_kernel[grid](logits, logits.stride(0), logits.shape[1], mask.rows, bits, bits.stride(0), width, WORDS)


def _bar(logits: Tensor, banned_tokens: BannedTokens) -> None:
    num = len(banned_tokens.ids)
    if num:
        ban_kernel[triton.cdiv(num, PAIRS),](logits, logits.stride(0), num, *_dense(*banned_tokens), PAIRS)


def _bias(logits: Tensor, biases: LogitBiases) -> None:
    num = len(biases.ids)
    if num:
        bias_kernel[triton.cdiv(num, PAIRS),](logits, logits.stride(0), num, *_dense(*biases), PAIRS)


def _penalise(logits: Tensor, found: Penalties) -> None:
    num = len(found.ids)
    if num:  # with `output_size`, the host does not wait for the device
        rows, *strengths = (
            one.repeat_interleave(found.sizes, output_size=num)
            for one in (found.rows, found.repetition, found.presence, found.frequency)
        )
        columns = _dense(rows, found.ids, found.counts, *strengths)
        penalise_kernel[triton.cdiv(num, PAIRS),](logits, logits.stride(0), num, *columns, PAIRS)


def _dense(*columns: Tensor) -> list[Tensor]:
    return [column.contiguous() for column in columns]


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
    """Applies penalties to PAIRS pairs. Grid: ⌈num / PAIRS⌉."""
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
    """Adds biases to PAIRS pairs. Grid: ⌈num / PAIRS⌉."""
    at = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = at < num
    places = (
        logits_ptr + tl.load(rows_ptr + at, mask=mask, other=0) * stride + tl.load(ids_ptr + at, mask=mask, other=0)
    )
    found = tl.load(places, mask=mask, other=0.0)
    tl.store(places, found + tl.load(values_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def ban_kernel(
    logits_ptr,  # float32 [R, V], rows `stride` apart
    stride,
    num,
    rows_ptr,  # int64 [num]
    ids_ptr,  # int64 [num]
    PAIRS: tl.constexpr,
):
    """Sets the logits of PAIRS banned tokens to -inf. Grid: ⌈num / PAIRS⌉."""
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
    """Sets logits that a mask excludes to -inf; writes no others. Grid: M, ⌈width / WORDS⌉."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + at)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bits_ptr + at * bits_stride + words, mask=words < width, other=-1)
    lane = tl.arange(0, 32)
    ids = words[:, None] * 32 + lane[None, :]
    is_barred = ((bits[:, None] >> lane[None, :]) & 1) == 0
    places = logits_ptr + row * stride + ids
    tl.store(places, tl.full([WORDS, 32], float("-inf"), tl.float32), mask=is_barred & (ids < vocab))


def _case(name: str, kernel: Any, **constants: int) -> AotCase:  # noqa: ANN401 # a kernel has no type
    types = dict.fromkeys(("logits_ptr", "counts_ptr", "repetition_ptr", "presence_ptr"), "*fp32")
    types |= dict.fromkeys(("frequency_ptr", "values_ptr"), "*fp32") | dict.fromkeys(("rows_ptr", "ids_ptr"), "*i64")
    types |= {"bits_ptr": "*i32"} | dict.fromkeys(("stride", "bits_stride"), "i64") | {"num": "i32"}
    types |= dict.fromkeys(("vocab", "width"), "i32")
    own = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    return AotCase(f"adjust/{name}", kernel, own, constants, frozenset({"num"} & own.keys()), vectors=NO_VECTORS)


NO_VECTORS: frozenset[str] = frozenset()  # each thread loads one pair or word
CASES = (
    _case("penalise", penalise_kernel, PAIRS=PAIRS),
    _case("bias", bias_kernel, PAIRS=PAIRS),
    _case("bar", ban_kernel, PAIRS=PAIRS),
    _case("mask", mask_kernel, WORDS=WORDS),
)
