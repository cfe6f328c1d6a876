"""The measured cases of matrix products: linear layers over weights of 8 and 4 bits, experts, and adapters.

Beside each, torch's product with the same weights in the activations' format. Roofline: bytes of weights, inputs and
outputs, or operations, whichever takes longer.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_cases import EPS, Case, CaseDevice, Sizes, Work, pure
from sluice_server.kernels.formats.packed_weights import dequantise, quantise_rows
from sluice_server.kernels.formats.planes import planes_of_4, planes_of_8
from sluice_server.kernels.formats.zero_points import round_groups
from sluice_server.kernels.reference.low_rank import MAX_PARTS, PLACES, LowRankTables
from sluice_server.kernels.reference.moe import ExpertStack
from sluice_server.kernels.triton import activation, gemv, linear4, linear8, linear8a16, low_rank, moe, norm


class Linear(Protocol):
    """Makes a square product of inputs [rows, width]."""

    def __call__(self, at: CaseDevice, rows: int, width: int) -> Work:
        """Makes the work."""


def cases(sizes: Sizes) -> Iterator[Case]:
    """All cases of this file: linear layers by kind and width over numbers of rows, and of one row; experts over
    numbers of tokens; adapters over numbers of rows."""
    for (name, make), width, num in itertools.product(LINEARS.items(), sizes.squares, sizes.rows):
        yield Case("linear", f"{name}, {width} x {width}", num, partial(make, rows=num, width=width), name == "fp8")
    for (name, make), width in itertools.product(ROWS.items(), sizes.squares):
        yield Case("row", f"{name}, {width} x {width}", 1, partial(make, width=width))
    for experts, num in itertools.product(sizes.experts, sizes.expert_tokens):
        yield Case("experts", f"{experts} experts", num, partial(mlp, tokens=num, num_experts=experts, sizes=sizes))
    for num in sizes.rows:
        name = f"{sizes.adapters} of rank {sizes.rank}, {sizes.squares[0]} x {sizes.squares[0]}"
        yield Case("adapters", name, num, partial(adapters, rows=num, sizes=sizes))


def w8a16(at: CaseDevice, rows: int, width: int) -> Work:
    """Weights of int8, widened in registers."""
    x, packed = at.randn(rows, width), quantise_rows(at.randn(width, width), torch.int8)
    meant = (packed.weight.float() * packed.scales[:, None]).to(at.dtype)
    weights, planes = packed.weight.nbytes + packed.scales.nbytes, planes_of_8(packed)
    return _linear(lambda: linear8a16.linear_w8a16(x, planes), x, meant, weights)


def w4a16(at: CaseDevice, rows: int, width: int) -> Work:
    """Weights of 4 bits as they are rounded at load."""
    x, packed = at.randn(rows, width), round_groups(at.randn(width, width))
    weights = packed.nibbles.nbytes + packed.scales.nbytes + packed.zeros.nbytes
    planes = planes_of_4(packed)
    return _linear(lambda: linear4.linear_w4a16(x, planes), x, dequantise(packed).to(at.dtype), weights)


def w8a8(at: CaseDevice, rows: int, width: int, dtype: torch.dtype = torch.int8) -> Work:
    """Weights and inputs of 8 bits; rounding the inputs row by row is part of the measured time."""
    x, packed = at.randn(rows, width), quantise_rows(at.randn(width, width), dtype)
    meant = (packed.weight.float() * packed.scales[:, None]).to(at.dtype)
    weights = packed.weight.nbytes + packed.scales.nbytes
    work = _linear(lambda: linear8.linear_w8a8(x, packed), x, meant, weights)
    return work._replace(size=1, tolerance=0.1)


def fp8(at: CaseDevice, rows: int, width: int) -> Work:
    """As `w8a8`, in float8."""
    return w8a8(at, rows, width, torch.float8_e4m3fn)


def one_row(at: CaseDevice, width: int) -> Work:
    """A row by a weight that is not rounded."""
    x, weight = at.randn(1, width), at.randn(width, width) * width**-0.5
    moved = weight.nbytes + 2 * x.nbytes
    return pure(lambda: gemv.linear(x, weight), lambda: F.linear(x, weight), moved)._replace(flops=2 * weight.numel())


def one_normed_row(at: CaseDevice, width: int) -> Work:
    """The same with the norm before it; torch's peer is our norm and cuBLAS."""
    x, weight = at.randn(1, width).float(), at.randn(width, width) * width**-0.5
    scales = torch.rand(width, device=at.device) + 0.5
    ours = partial(gemv.linear, x, weight, norm=(scales, EPS))
    return pure(
        ours, lambda: F.linear(norm.rms_norm(x, scales, EPS, at.dtype), weight), weight.nbytes + 2 * x.nbytes
    )._replace(flops=2 * weight.numel())


def one_gated_row(at: CaseDevice, width: int) -> Work:
    """The same with the gate behind it; torch's peer is cuBLAS and our gate."""
    x, weight = at.randn(1, width), at.randn(width, width) * width**-0.5
    ours = partial(gemv.linear, x, weight, gate="silu")
    return pure(ours, lambda: activation.silu_mul(F.linear(x, weight)), weight.nbytes + 2 * x.nbytes)._replace(
        flops=2 * weight.numel()
    )


ROWS: dict[str, Callable[..., Work]] = {"plain": one_row, "normed": one_normed_row, "gated": one_gated_row}
LINEARS: dict[str, Linear] = {"w8a16": w8a16, "w4a16": w4a16, "w8a8": w8a8, "fp8": fp8}


def _linear(ours: Callable[[], Tensor], x: Tensor, meant: Tensor, weights: int) -> Work:
    outputs, inputs = meant.shape
    moved = weights + x.element_size() * len(x) * (inputs + outputs)
    return pure(ours, lambda: F.linear(x, meant), moved)._replace(flops=2 * len(x) * inputs * outputs)


def mlp(at: CaseDevice, tokens: int, num_experts: int, sizes: Sizes) -> Work:
    """A layer of experts; only weights of experts that some token chose are counted."""
    x, hidden, inner = at.randn(tokens, sizes.hidden), sizes.hidden, sizes.inner
    gate_up = at.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    down = at.randn(num_experts, hidden, inner) * inner**-0.5
    experts = torch.rand(tokens, num_experts, device=at.device).argsort(dim=1)[:, : sizes.chosen]
    shares = torch.rand(tokens, sizes.chosen, device=at.device).softmax(1)
    owned = [(one, *torch.where(experts == one)) for one in experts.unique().tolist()]

    def peer() -> Tensor:
        """One expert after the other with known tokens: faster than torch users can have it."""
        y = torch.zeros(tokens, hidden, device=at.device)
        for one, rows, columns in owned:
            gate, up = F.linear(x[rows], gate_up[one]).chunk(2, dim=1)
            found = F.linear(F.silu(gate) * up, down[one])
            y.index_add_(0, rows, found * shares[rows, columns, None])
        return y.to(at.dtype)

    moved = len(owned) * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes
    flops = 6 * experts.numel() * hidden * inner
    ours = partial(moe.experts_mlp, x, ExpertStack(gate_up), ExpertStack(down), experts, shares)
    return pure(ours, peer, moved)._replace(flops=flops)


def adapters(at: CaseDevice, rows: int, sizes: Sizes) -> Work:
    """Low-rank products beside a square linear, for rows that have adapters by turns; only those that some row has are
    counted. Beside it, one adapter after the other with known rows, by torch."""
    width, rank, num = sizes.squares[0], sizes.rank, sizes.adapters
    x, a, b = at.randn(rows, width), at.randn(num, rank, width) * width**-0.5, at.randn(num, rank, width)
    places = torch.zeros(num + 1, PLACES, dtype=torch.int64)
    for slot in range(num):
        places[slot, :5] = torch.tensor([slot * a[0].numel(), rank, 0, rank, a.numel() + slot * b[0].numel()])
    memory, scales = torch.cat([a.flatten(), b.flatten()]), torch.ones(num + 1, MAX_PARTS, device=at.device)
    tables, parts = LowRankTables(memory, places.to(at.device), scales), [(0, width)]
    owners = torch.arange(rows, device=at.device) % num
    groups, y = low_rank.group(owners, num + 1), torch.zeros(rows, width, device=at.device, dtype=at.dtype)
    owned = [(slot, torch.arange(slot, rows, num, device=at.device)) for slot in range(min(num, rows))]

    def peer(y: Tensor) -> Tensor:
        for slot, own in owned:
            y.index_add_(0, own, x[own] @ a[slot].t() @ b[slot])
        return y

    def both() -> tuple[Tensor, Tensor]:
        return low_rank.add_low_rank_(torch.zeros_like(y), x, tables, parts, groups), peer(torch.zeros_like(y))

    ours = partial(low_rank.add_low_rank_, y, x, tables, parts, groups)
    moved = len(owned) * (a[0].nbytes + b[0].nbytes) + x.nbytes + 2 * y.nbytes
    return Work(ours, partial(peer, y), moved, both, flops=4 * rows * rank * width)
