"""Linear layers of one row on a CUDA device, with the norm before and the gate or the sum behind in the same kernel.

The reference implementation is `kernels.reference.gemv`. A row is multiplied without tensor cores, as reading the
weight takes longest.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.dependent import dependent
from sluice_server.kernels.triton.gemv_kernels import gemv_kernel, held_kernel
from sluice_server.kernels.triton.gpu_traits import gpu_of
from sluice_server.kernels.triton.numbers import next_power_of_two, pointer

MANY = 4096  # rows of a weight from which a program reads more of them
HEAD = 65_536  # rows of a weight that only a vocabulary has
HELD = 4096  # most inputs of a row that is held in registers
FUSED = (
    2048  # most inputs of a norm that is computed with the gate behind it: of more, it is read as often as the weight
)
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

    Measured on an H200, in recorded chains of the products of an 8B and of a 0.6B shape.
    """
    width = next_power_of_two(inputs)
    if is_normed and is_gated:
        return RowTiles(4, width, 8, 3)
    if is_normed and num_rows >= HEAD and 2048 < inputs <= HELD:
        return RowTiles(2, width, 8, 4)
    if is_normed:  # of x and the norm's weight a thread reads as much as of four rows
        return RowTiles(8 if num_rows >= MANY and inputs > 1024 else 4, 512, 4)
    if is_gated:
        return RowTiles(1, 2048, 4) if inputs % 2048 == 0 else RowTiles(2, 512, 4)
    if num_rows < MANY and 2048 < inputs <= HELD:
        return RowTiles(4, width, 8, 3)
    if inputs % 2048 == 0:
        return RowTiles(4, 2048, 8 if inputs <= HELD else 4)
    return RowTiles(4 if num_rows >= MANY else 2, 1024, 4)


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
            residual, and with a norm of up to `FUSED` inputs.
        residual: float32 [1, N], to which the result is added in place.
        out: [1, N] of any format, for the result of a product without a residual.

    Returns:
        [1, N] in the weight's dtype, or [1, N / 2] with a gate, or the residual, or `out`.

    Raises ValueError for a gate beside a residual or a longer norm.
    """
    if gate and (residual is not None or (norm is not None and weight.shape[1] > FUSED)):
        raise ValueError(
            f"the gate {gate!r} has no sum behind it in this launch, and no norm of more than {FUSED} inputs"
        )
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
    _case("held-added", 1024, 3072, is_even=False, IS_ADDED=True),
    _case("held-gated", 6144, 1024, IS_NORMED=True, IS_WEIGHED=True, GATE=1),
    _case("held-head", HEAD, IS_NORMED=True, IS_WEIGHED=True),
)
