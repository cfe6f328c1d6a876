"""Kernels that multiply one row by a weight.

A short row is held, normed, in registers while a program goes through tiles of the weight. Of a longer one a program
computes one tile, and the mean square of a norm is added up beside the products, and scales their sums. Both read the
first tile of the weight before the row is there, as no kernel writes a weight.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.activation import gated
from sluice_server.kernels.triton.dependent import wait_for_inputs


@triton.jit
def gemv_kernel(
    x_ptr,  # [inputs]
    norm_ptr,  # [inputs]; unused when not IS_WEIGHED
    weight_ptr,  # [outputs, inputs], or twice as many rows with a GATE, `weight_stride` apart
    weight_stride,
    bias_ptr,  # one of each row of the weight; unused when not HAS_BIAS
    y_ptr,  # [outputs]; read, too, when IS_ADDED
    outputs,
    inputs,
    eps,
    IS_NORMED: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,  # 0: none, 1: SiLU, 2: GELU by tanh
    IS_ADDED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # the weight consists of whole tiles
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a row
    IS_DEPENDENT: tl.constexpr,
):
    """Computes ROWS outputs, with a GATE of twice as many rows. Grid: ⌈outputs / ROWS⌉."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, INPUTS)
    is_output = n < outputs
    places = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    up_places = weight_ptr + (n + outputs).to(tl.int64)[:, None] * weight_stride + k[None, :]
    weights = _weights(places, is_output, k < inputs, IS_EVEN)
    ups = _weights(up_places, is_output, k < inputs, IS_EVEN) if GATE else weights
    wait_for_inputs(IS_DEPENDENT)
    sums = tl.zeros([ROWS, INPUTS], tl.float32)
    others = tl.zeros([ROWS, INPUTS], tl.float32)
    for step in range(STEPS):
        at = step * INPUTS
        x = _part(x_ptr + at + k, at + k < inputs, IS_EVEN)
        if IS_WEIGHED:
            x *= _part(norm_ptr + at + k, at + k < inputs, IS_EVEN)
        if step > 0:
            weights = _weights(places + at, is_output, at + k < inputs, IS_EVEN)
            ups = _weights(up_places + at, is_output, at + k < inputs, IS_EVEN) if GATE else weights
        sums += weights.to(tl.float32) * x[None, :]
        if GATE:
            others += ups.to(tl.float32) * x[None, :]
    scale = 1.0
    if IS_NORMED:  # in a loop of its own, behind the weights: here x is at hand, and its threads are other ones
        squares = tl.zeros([INPUTS], tl.float32)
        for at in range(0, inputs, INPUTS):
            x = _part(x_ptr + at + k, at + k < inputs, IS_EVEN)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    _finish(tl.sum(sums, 1) * scale, tl.sum(others, 1) * scale, n, bias_ptr, y_ptr, outputs, HAS_BIAS, GATE, IS_ADDED)


@triton.jit
def held_kernel(
    x_ptr,  # as of `gemv_kernel`
    norm_ptr,
    weight_ptr,
    weight_stride,
    bias_ptr,
    y_ptr,
    outputs,
    inputs,
    eps,
    IS_NORMED: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,  # at least the inputs
    STEPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes the outputs of every so many-th tile of ROWS. Grid: any."""
    tl.static_assert(STEPS == 1, "a row that is held is one tile")
    k, row = tl.arange(0, INPUTS), tl.arange(0, ROWS)
    first, stride = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    is_in = k < inputs
    weights = _row_tile(weight_ptr, first + row, k, weight_stride, outputs, is_in)
    ups = weights
    if GATE:
        ups = _row_tile(
            weight_ptr + outputs.to(tl.int64) * weight_stride, first + row, k, weight_stride, outputs, is_in
        )
    wait_for_inputs(IS_DEPENDENT)
    x = _part(x_ptr + k, is_in, IS_EVEN)
    if IS_NORMED:
        x *= tl.rsqrt(tl.sum(x * x, 0) / inputs + eps)
    if IS_WEIGHED:
        x *= _part(norm_ptr + k, is_in, IS_EVEN)
    for at in range(first, outputs, stride):
        behind = at + stride + row
        next_weights = _row_tile(weight_ptr, behind, k, weight_stride, outputs, is_in)
        next_ups = next_weights
        if GATE:
            halfway = weight_ptr + outputs.to(tl.int64) * weight_stride
            next_ups = _row_tile(halfway, behind, k, weight_stride, outputs, is_in)
        y = tl.sum(weights.to(tl.float32) * x[None, :], 1)
        up = tl.sum(ups.to(tl.float32) * x[None, :], 1) if GATE else y
        _finish(y, up, at + row, bias_ptr, y_ptr, outputs, HAS_BIAS, GATE, IS_ADDED)
        weights, ups = next_weights, next_ups


@triton.jit
def _finish(y, up, n, bias_ptr, y_ptr, outputs, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, IS_ADDED: tl.constexpr):
    """Adds biases to sums y of outputs n, gates them by `up`, adds and stores them."""
    is_output = n < outputs
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
    if GATE:
        if HAS_BIAS:
            up += tl.load(bias_ptr + outputs + n, mask=is_output, other=0.0).to(tl.float32)
        y = gated(y, up, GATE == 2)
    if IS_ADDED:
        y += tl.load(y_ptr + n, mask=is_output, other=0.0)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _row_tile(weight_ptr, n, k, stride, outputs, is_in):
    """Returns rows n of a weight, 0 where there is none."""
    places = weight_ptr + n.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(places, mask=(n < outputs)[:, None] & is_in[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _part(places, mask, IS_EVEN: tl.constexpr):
    """Returns numbers in float32, 0 where there are none."""
    if IS_EVEN:
        return tl.load(places).to(tl.float32)
    else:
        return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(places, is_output, is_in, IS_EVEN: tl.constexpr):
    """Returns a tile of a weight, 0 where there is none. It is read once, and so leaves the cache first."""
    if IS_EVEN:
        return tl.load(places, eviction_policy="evict_first")
    else:
        return tl.load(places, mask=is_output[:, None] & is_in[None, :], other=0.0, eviction_policy="evict_first")
