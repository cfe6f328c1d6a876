"""Linear layers of one row on a CUDA device, with the norm before and the gate or the sum behind in the same kernel.

The reference implementation is `kernels.reference.gemv`. A row is multiplied without tensor cores, as
reading the weight takes longest. If a row is short, a program holds it, normed, in registers while it goes through
tiles of the weight. If not, a program computes one tile, and the mean square of a norm is added up beside the products,
and scales their sums. Both read the first tile of the weight before the row is there, as no kernel writes a weight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.activation import gated
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.dependent import dependent, wait_for_inputs
from sluice_server.kernels.triton.gpu_traits import gpu_of
from sluice_server.kernels.triton.numbers import pointer

MANY = 4096  # rows of a weight from which a program reads more of them
GATES = {"silu": 1, "gelu_tanh": 2}  # those that a kernel computes


class RowTiles(NamedTuple):
    """What a program computes: outputs, and inputs that it multiplies at once, by so many warps.

    `programs`: of each multiprocessor, which go through all tiles with the row in registers; 0: one for each tile.
    """

    rows: int
    inputs: int
    warps: int
    programs: int = 0


def tiles_of(num_rows: int, inputs: int, *, is_normed: bool, is_gated: bool) -> RowTiles:
    """Returns the tiles for a weight of so many rows; a gate takes two rows of it for each output.

    Measured on an H200 over the weights of an 8B shape, and 1024 inputs for a smaller one.
    """
    if is_normed:  # of x and the norm's weight a thread reads as much as of four rows
        return RowTiles(8 if num_rows >= MANY else 4, 512, 4)
    rows = 4 if num_rows >= MANY else 2
    return RowTiles(rows // 2 if is_gated else rows, 2048 if inputs % 2048 == 0 else 1024, 4)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies a row x [1, K] by a weight [N, K] and adds a bias [N].

    Args:
        norm: weight [K], or None for ones, and epsilon of the RMSNorm of x; None for no norm.
        gate: one of `GATES`; the outputs' halves are then multiplied as activation(first) · second. Only without a
            norm, which read as much as the weight beside it, and a residual.
        residual: float32 [1, N], to which the result is added in place.
        out: [1, N] of any format, for the result of a product without a residual.

    Returns:
        [1, N] in the weight's dtype, or [1, N / 2] with a gate, or the residual, or `out`.

    Raises ValueError for a gate beside a norm or a residual.
    """
    if gate and residual is not None:
        raise ValueError(f"the gate {gate!r} has no norm before it in this launch, and no sum behind it")
    outputs, inputs = len(weight) // (2 if gate else 1), weight.shape[1]
    y = out if residual is None else residual
    if y is None:
        y = torch.empty(1, outputs, dtype=weight.dtype, device=x.device)
    tiles = tiles_of(len(weight), inputs, is_normed=norm is not None, is_gated=bool(gate))
    scales, eps = (None, 0.0) if norm is None else norm
    kernel, num = gemv_kernel, triton.cdiv(outputs, tiles.rows)
    if tiles.programs:
        kernel, num = held_kernel, min(num, tiles.programs * gpu_of(x.device).num_multiprocessors)
    kernel[num,](
        x,
        x if scales is None else scales,
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        y,
        outputs,
        inputs,
        eps,
        IS_NORMED=norm is not None,
        IS_WEIGHED=scales is not None,
        HAS_BIAS=bias is not None,
        GATE=GATES[gate] if gate else 0,
        IS_ADDED=residual is not None,
        IS_EVEN=inputs % tiles.inputs == 0 and outputs % tiles.rows == 0,
        ROWS=tiles.rows,
        INPUTS=tiles.inputs,
        STEPS=triton.cdiv(inputs, tiles.inputs),
        num_warps=tiles.warps,
        **dependent(x),
    )
    return y


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


def _case(name: str, num_rows: int = MANY, inputs: int = 4096, *, is_even: bool = True, **given: int) -> AotCase:
    constants = dict.fromkeys(("IS_NORMED", "IS_WEIGHED", "HAS_BIAS", "GATE", "IS_ADDED"), 0) | given
    is_added, is_normed = bool(constants["IS_ADDED"]), bool(constants["IS_NORMED"])
    tiles = tiles_of(num_rows, inputs, is_normed=is_normed, is_gated=bool(constants["GATE"]))
    types = dict.fromkeys(("weight_ptr", "bias_ptr"), "*bf16") | {"norm_ptr": "*fp32", "weight_stride": "i64"}
    types |= {"x_ptr": "*fp32" if is_normed else "*bf16", "y_ptr": pointer(torch.float32) if is_added else "*bf16"}
    types |= {"outputs": "i32", "inputs": "i32", "eps": "fp32"}
    constants |= {"IS_EVEN": is_even, "ROWS": tiles.rows, "INPUTS": tiles.inputs}
    constants["STEPS"] = -(-inputs // tiles.inputs)
    vectors = frozenset({"loads"}) if is_even else frozenset()
    return AotCase(
        f"gemv/{name}",
        held_kernel if tiles.programs else gemv_kernel,
        types,
        constants,
        num_warps=tiles.warps,
        vectors=vectors,
    )


CASES = (
    _case("plain"),
    _case("few", 1024, 1024),
    _case("uneven", is_even=False),
    _case("normed", IS_NORMED=True, IS_WEIGHED=True),
    _case("gated", GATE=1),
    _case("added", IS_ADDED=True),
)
