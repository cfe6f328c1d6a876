"""Calls the C++ kernels of encoders with tensors: norms, activations, and a pre-normed layer in two calls.

Everything is float32 and contiguous, but for weights, which are as `NativeLinear.arguments` says. Depends on tensors;
not on models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds

# As in kernels/cpu/activations.h, by their names in `kernels.reference.encoders`.
ACTIVATIONS = {name: at for at, name in enumerate(("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"))}
Run = tuple[int, int, int, int]  # tokens from the first to the second, which see those from the third to the fourth


def takes(x: Tensor) -> bool:
    """Returns whether norms and activations of x can be computed here."""
    return has_encoders() and x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


def has_encoders() -> bool:
    """Returns whether there are these kernels: those that were built before an update of the sources may lack them."""
    return hasattr(builds.MODULE, "encoder_project")


def activate(x: Tensor, name: str) -> Tensor:
    """Returns an activation of x [.., N]; see `kernels.reference.encoders.activate`."""
    assert builds.MODULE is not None
    y = x.clone()
    builds.MODULE.activate_rows(ACTIVATIONS[name], y.data_ptr(), y.numel() // y.shape[-1], y.shape[-1])
    return y


def norm_numbers(weight: Tensor, bias: Tensor | None, eps: float, *, is_root: bool) -> tuple[float, ...]:
    """Returns the numbers of a norm: whether it is by the root of the mean square, addresses of weight and bias, and
    what is added to the mean square."""
    return (int(is_root), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns LayerNorm of x [.., N]; weight and bias float32 [N]."""
    assert builds.MODULE is not None and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    y, numbers = torch.empty_like(x), norm_numbers(weight, bias, eps, is_root=False)
    builds.MODULE.norm_rows(*numbers, x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1], x.shape[-1])
    return y


class EncoderCall(NamedTuple):
    """A layer of an encoder as its kernels take it.

    Attributes:
        linears: `NativeLinear.arguments` of qkv, output, up and down, each followed by a 0.
        norms: `norm_numbers` before attention and before the MLP.
        activation: name in ACTIVATIONS.
        is_gated: whether the activation of the first half of `up` is multiplied by the second.
        heads, dim: of attention.
    """

    linears: tuple[int, ...]
    norms: tuple[float, ...]
    activation: str
    is_gated: bool
    heads: int
    dim: int

    @property
    def numbers(self) -> tuple[float, ...]:
        """The arguments that stay from call to call."""
        activation = ACTIVATIONS[self.activation]
        return (*self.linears, *self.norms, activation, int(self.is_gated), self.heads, self.dim)


class EncoderPass:
    """One input on its way through a layer: its hidden states, and what attention reads of them."""

    def __init__(self, numbers: Sequence[float], h: Tensor, heads: int) -> None:
        """`numbers`: of an `EncoderCall` with so many `heads`; `h`: float32 [T, hidden], changed in place."""
        assert builds.MODULE is not None and h.is_contiguous() and h.dtype is torch.float32
        self._module, self._h = builds.MODULE, h
        dim = h.shape[1] // heads
        self._heads = torch.empty(self._module.encoder_heads_size(heads, dim, len(h)))
        self._numbers = (*numbers, self._heads.data_ptr(), len(h))

    def project(self, first: int, last: int, cis: Tensor | None) -> None:
        """Computes queries, keys and values of the tokens from `first` to `last`. `cis`: complex64 [T, D/2], which
        turns the pairs (i, i + D/2) of queries and keys; None without rotation."""
        assert cis is None or cis.is_contiguous()
        turned = 0 if cis is None else cis.data_ptr() + first * cis.stride(0) * cis.itemsize
        self._module.encoder_project(*self._numbers, *self._rows(first, last), turned)

    def advance(self, first: int, last: int, runs: Sequence[Run]) -> None:
        """Adds attention and then the MLP to the hidden states of these tokens. `runs`: whom they see; one behind the
        other, and all projected."""
        seen = torch.tensor(runs, dtype=torch.int64)
        self._module.encoder_advance(*self._numbers, *self._rows(first, last), seen.data_ptr(), len(runs))

    def _rows(self, first: int, last: int) -> tuple[int, int, int]:
        return self._h.data_ptr() + first * self._h.stride(0) * self._h.itemsize, first, last - first
