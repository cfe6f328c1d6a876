"""Mixture of experts on a CUDA device; reference implementations in `kernels.reference.moe`.

Two small kernels put choices in groups of one expert each, without a sort and without waiting for the host. One kernel
multiplies group by group; each tile gathers the inputs of its choices. One adds up each token's results.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.moe import ExpertGroups, ExpertStack, num_groups
from sluice_server.kernels.triton.activation import GATES
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.gemm import DECODE, LARGE, MEDIUM, GemmTiles
from sluice_server.kernels.triton.numbers import next_power_of_two, pointer
from sluice_server.kernels.triton.widen import widened

CHOICES = 1024  # choices that a program counts or places at once
BLOCK = 1024  # elements of a program that adds results
BY_SHARE = ((64, LARGE), (32, MEDIUM), (0, DECODE))  # least average number of choices of an expert → tiles


def tiles_of(num_choices: int, num_experts: int) -> GemmTiles:
    """Returns the tiles for this number of choices: small groups if an expert has few choices on average."""
    return next(tiles for least, tiles in BY_SHARE if num_choices >= least * num_experts)


def group(experts: Tensor, num_experts: int, size: int) -> ExpertGroups:
    """Puts choices of experts in groups, in any order within an expert; see `kernels.reference.moe.group`."""
    num, experts = num_groups(len(experts), num_experts, size), experts.contiguous()
    choices = torch.full((num * size,), -1, dtype=torch.int32, device=experts.device)
    owners = torch.full((num,), -1, dtype=torch.int32, device=experts.device)
    if num:
        ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
        block = next_power_of_two(num_experts)
        lay_out_kernel[1,](experts, len(experts), num_experts, owners, ends, size, CHOICES, block)
        place_kernel[triton.cdiv(len(experts), CHOICES),](experts, len(experts), ends, choices, CHOICES)
    return ExpertGroups(choices, owners, size)


def grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, groups: ExpertGroups, num_choices: int, per_token: int
) -> Tensor:
    """Multiplies each choice's input by its expert's weights; see `kernels.reference.moe.grouped_linear`.

    Raises ValueError for a group size that is no multiple of the tile's, and for tensors that are not contiguous.
    """
    outputs, inputs = weight.shape[1:]
    y = torch.empty(num_choices, outputs, dtype=x.dtype, device=x.device)
    tiles = next(tiles for _, tiles in BY_SHARE if tiles.m <= groups.size)
    if groups.size % tiles.m or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"groups of {groups.size}: a multiple of {tiles.m}, and contiguous numbers, wanted")
    if y.numel():
        grid = (len(groups.experts) * (groups.size // tiles.m), triton.cdiv(outputs, tiles.n))
        grouped_kernel[grid](
            x,
            x.stride(0),
            weight,
            x if scales is None else scales,
            groups.choices,
            groups.experts,
            y,
            outputs,
            inputs,
            per_token,
            groups.size // tiles.m,
            HAS_SCALES=scales is not None,
            IS_EXACT=x.dtype is torch.float32,
            M=tiles.m,
            N=tiles.n,
            K=tiles.k,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return y


def combine(y: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum over a token's choices of share · result; see `kernels.reference.moe.combine`."""
    (tokens, per_token), outputs = shares.shape, y.shape[1]
    found = torch.empty(tokens, outputs, dtype=y.dtype, device=y.device)
    if found.numel():
        combine_kernel[triton.cdiv(outputs, BLOCK), tokens](y, shares.contiguous(), found, outputs, per_token, BLOCK)
    return found


def experts_mlp(
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    experts: Tensor,
    shares: Tensor,
    activation: str = "silu",
    *,
    is_fixed: bool = False,
) -> Tensor:
    """Computes the MLPs of the experts chosen for each token, by their shares; see
    `kernels.reference.moe.experts_mlp`."""
    num, num_experts, per_token, chosen = experts.numel(), len(gate_up.weight), experts.shape[1], experts.flatten()
    groups = group(chosen, num_experts, (DECODE if is_fixed else tiles_of(num, num_experts)).m)
    halves = gate_up.biased(grouped_linear(x, gate_up.weight, gate_up.scales, groups, num, per_token), chosen)
    inner = GATES[activation](halves)
    return combine(down.biased(grouped_linear(inner, down.weight, down.scales, groups, num, 1), chosen), shares)


@triton.jit
def lay_out_kernel(
    experts_ptr,  # int64 [num]
    num,
    num_experts,
    owners_ptr,  # int32 [groups], written only for groups that are used
    ends_ptr,  # int32 [num_experts]: the place of each expert's next choice
    size,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,  # num_experts, rounded up to a power of two
):
    """Counts the choices of each expert, and assigns groups to experts. Grid: 1."""
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num, CHOICES):
        at = first + tl.arange(0, CHOICES)
        chosen = tl.load(experts_ptr + at, mask=at < num, other=0).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS, mask=at < num)
    groups = tl.cdiv(counts, size)
    firsts = tl.cumsum(groups, 0) - groups
    expert = tl.arange(0, EXPERTS)
    tl.store(ends_ptr + expert, firsts * size, mask=expert < num_experts)
    for done in range(0, tl.max(groups, 0)):
        tl.store(owners_ptr + firsts + done, expert, mask=done < groups)


@triton.jit
def place_kernel(
    experts_ptr,  # int64 [num]
    num,
    ends_ptr,  # int32 [num_experts], incremented by each choice
    choices_ptr,  # int32 [groups · size]
    CHOICES: tl.constexpr,
):
    """Places choices in their groups, in any order: a row's product does not depend on its place. Grid: ⌈num /
    CHOICES⌉."""
    at = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts_ptr + at, mask=at < num, other=0)
    place = tl.atomic_add(ends_ptr + chosen, 1, mask=at < num, sem="relaxed")
    tl.store(choices_ptr + place, at, mask=at < num)


@triton.jit
def grouped_kernel(
    x_ptr,  # [T, inputs], rows `x_stride` apart
    x_stride,
    weight_ptr,  # [E, outputs, inputs]
    scales_ptr,  # float32 [E, outputs]; unused when not HAS_SCALES
    choices_ptr,  # int32 [groups · size]
    experts_ptr,  # int32 [groups]
    y_ptr,  # [choices, outputs]
    outputs,
    inputs,
    per_token,
    per_group,  # tiles of a group
    HAS_SCALES: tl.constexpr,
    IS_EXACT: tl.constexpr,  # float32 inputs are not rounded to fewer bits
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiplies one tile of choices of one expert. Grid: tiles of choices, ⌈outputs / N⌉."""
    expert = tl.load(experts_ptr + tl.program_id(0) // per_group).to(tl.int64)
    if expert >= 0:
        choice = tl.load(choices_ptr + tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
        n = tl.program_id(1) * N + tl.arange(0, N)
        k = tl.arange(0, K)
        is_choice, is_output = choice >= 0, n < outputs
        x_places = x_ptr + (choice // per_token)[None, :] * x_stride + k[:, None]
        places = weight_ptr + (expert * outputs + n)[:, None] * inputs + k[None, :]
        total = tl.zeros([N, M], tl.float32)
        for at in range(0, inputs, K):
            is_in = at + k < inputs
            x = tl.load(x_places + at, mask=is_choice[None, :] & is_in[:, None], other=0.0)
            weight = tl.load(places + at, mask=is_output[:, None] & is_in[None, :], other=0.0)
            total = tl.dot(widened(weight, x.dtype), x, total, input_precision="ieee" if IS_EXACT else "tf32")
        y = tl.trans(total)
        if HAS_SCALES:
            y *= tl.load(scales_ptr + expert * outputs + n, mask=is_output, other=0.0)[None, :]
        target = y_ptr + choice[:, None] * outputs + n[None, :]
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=is_choice[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(
    y_ptr,  # [T · per_token, outputs]
    shares_ptr,  # [T, per_token]
    found_ptr,  # [T, outputs]
    outputs,
    per_token,
    BLOCK: tl.constexpr,
):
    """Adds up BLOCK outputs of a token, weighted by shares. Grid: ⌈outputs / BLOCK⌉, T."""
    token = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(0, per_token):
        row = token * per_token + choice
        own = tl.load(y_ptr + row * outputs + at, mask=at < outputs, other=0.0).to(tl.float32)
        total += own * tl.load(shares_ptr + row).to(tl.float32)
    tl.store(found_ptr + token * outputs + at, total.to(found_ptr.dtype.element_ty), mask=at < outputs)


def _grouped(tiles: GemmTiles, weight: torch.dtype, *, is_quick: bool = False) -> AotCase:
    types = {"x_ptr": "*bf16", "weight_ptr": pointer(weight), "scales_ptr": "*fp32", "y_ptr": "*bf16"}
    types |= {"choices_ptr": "*i32", "experts_ptr": "*i32", "x_stride": "i64"}
    types |= dict.fromkeys(("outputs", "inputs", "per_token", "per_group"), "i32")
    has_scales = weight is torch.int8
    constants = {"HAS_SCALES": has_scales, "IS_EXACT": False, "M": tiles.m, "N": tiles.n, "K": tiles.k}
    return AotCase(
        f"moe/{pointer(weight)[1:]}-m{tiles.m}",
        grouped_kernel,
        types,
        constants,
        frozenset({"per_token", "per_group"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        is_quick=is_quick,
    )


def _small(name: str, kernel: Any, vectors: frozenset[str] = frozenset(), **constants: int) -> AotCase:  # noqa: ANN401 # a kernel has no type
    types = {"experts_ptr": "*i64", "ends_ptr": "*i32", "owners_ptr": "*i32", "choices_ptr": "*i32", "y_ptr": "*bf16"}
    types |= {"shares_ptr": "*fp32", "found_ptr": "*bf16"}
    types |= dict.fromkeys(("num", "num_experts", "size", "outputs", "per_token"), "i32")
    own = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    unaligned = frozenset({"num", "num_experts", "per_token"} & own.keys())
    return AotCase(f"moe/{name}", kernel, own, constants, unaligned, vectors=vectors)


CASES = (
    *(_grouped(tiles, torch.bfloat16, is_quick=tiles is DECODE) for tiles in (DECODE, MEDIUM, LARGE)),
    *(_grouped(tiles, torch.int8) for tiles in (DECODE, LARGE)),
    _small("lay-out-64", lay_out_kernel, CHOICES=CHOICES, EXPERTS=64),
    _small("lay-out-256", lay_out_kernel, CHOICES=CHOICES, EXPERTS=256),
    _small("place", place_kernel, CHOICES=CHOICES),
    _small("combine", combine_kernel, frozenset({"loads", "stores"}), BLOCK=BLOCK),
)
