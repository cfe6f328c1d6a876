"""Norms, activations and rotary embedding in torch operators, for any device and dtype."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BOUND, STEEP = 7.0, 1.702  # bound and factor of the gate of gpt-oss
SPLIT = 16_384  # elements of a tensor from which torch may split it over several threads of a CPU


class HeadNorms(NamedTuple):
    """The norms of queries and keys, head by head: weights float32 [heads + kv_heads, D], and what is added to the mean
    square."""

    weights: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns RMSNorm over the last dimension (Zhang & Sennrich 2019), in `dtype`.

    Computed in x's dtype, which is float32 on the residual stream. `weight` is None when it is folded into the next
    linear layer. Four small operators take 19 µs on [8, 256], `F.rms_norm` 46 µs.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    y = x * scale
    if weight is not None:
        y = y.mul_(weight) if y.dtype is weight.dtype else y * weight
    return y if dtype is None or y.dtype is dtype else y.to(dtype)


def add_rms_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Adds x [T, d] to residual [T, d] in place, and returns RMSNorm of the sum in `dtype` (default: x's dtype)."""
    residual += x
    return rms_norm(residual, weight, eps, dtype or x.dtype)


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    """Returns a constant as a tensor, cached: wrapping a Python number costs a microsecond at every use."""
    return torch.tensor(value, device=device)


def norm_heads_(heads: Tensor, norms: HeadNorms) -> None:
    """Replaces the queries and keys among heads [T, heads + 2 kv_heads, D] by their norms."""
    normed = heads[:, : len(norms.weights)]
    normed.copy_(rms_norm(normed.float(), norms.weights, norms.eps))


def rope_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotates neighbouring pairs of x [T, heads, D] in place by cis (complex64 [T, 1, D/2])."""
    if x.dtype is torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(cis)
        return x
    wide = x.float()
    torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2)).mul_(cis)
    return x.copy_(wide)


def _by_rows(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps a gate so that on a CPU its rows do not depend on one another.

    Torch computes the last numbers of a loop, which do not fill a vector, with another exponential. Loops must
    therefore end where rows do, and not inside a row where torch splits the work between threads.
    """

    @functools.wraps(gate)
    def gated(gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        if gate_up.device.type != "cpu" or len(gate_up) * width < SPLIT:
            return gate(gate_up)
        return torch.cat([gate(rows) for rows in gate_up.split(max(1, (SPLIT - 1) // width))])

    return gated


@_by_rows
def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) · second half of [T, 2 I]: [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@_by_rows
def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Returns GELU(first half) · second half of [T, 2 I]: [T, I]. GELU is approximated by tanh (Hendrycks & Gimpel
    2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@_by_rows
def clamped_mul(gate_up: Tensor) -> Tensor:
    """Returns the gate of gpt-oss (OpenAI 2025) of [T, 2 I]: both halves are clamped, and 1 is added to the second.
    [T, I]."""
    bounded = gate_up.clamp(max=BOUND)
    gate, up = bounded.chunk(2, dim=-1)
    steep = (bounded * STEEP).chunk(2, dim=-1)[0]  # rows apart in memory: else one loop covers them all
    return steep.sigmoid().mul_(gate).mul_(up.clamp(min=-BOUND).add_(1.0))


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "clamped": clamped_mul,
}


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replaces x by cap · tanh(x / cap) in place (Bello et al. 2016)."""
    return x.div_(cap).tanh_().mul_(cap)
