"""Mixture-of-experts MLPs (Shazeer et al.

2017): a router chooses experts per token; their outputs are weighted and added.

Three forms. `NativeExperts` is one call of the C++ kernels. `SeparateExperts` multiplies expert by expert with the
linears of a dense layer, whose rows do not depend on other tokens; it is the reference implementation of the former and
its fallback. `StackedExperts` uses a GPU's kernels, which take all experts at once, so that the host does not wait for
the routing. Takes packed linears and numbers; tensor names are in `mlp_weights`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.engine.parallel.sums import RankSums
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import native
from sluice_server.kernels.formats.gpu_linear import Int8OnGpu
from sluice_server.kernels.formats.gpu_plain import PlainOnGpu
from sluice_server.kernels.formats.library_experts import experts_by_library, library_tokens
from sluice_server.kernels.formats.linear import GpuLinear, Matrix, NativeLinear, PackedLinear, gather
from sluice_server.kernels.formats.planes import rows_of_8
from sluice_server.kernels.reference import moe
from sluice_server.kernels.reference.moe import ExpertStack


class Experts(Mlp, Protocol):
    """An MLP of experts, whose result may be wanted by itself."""

    def add_into(self, to: Tensor, h: Tensor, eps: float) -> Tensor:
        """Computes to [T, hidden] (float32) += experts(norm(h)) in place; returns `to`, which may be h."""


@dataclasses.dataclass(frozen=True)
class ExpertRouter:
    """Routes tokens to experts.

    Attributes:
        linear: projection to a logit per expert.
        per_token: experts that a token is routed to.
        renormalises: whether their weights are scaled to add up to 1.
        first: the first expert that is computed here, where experts are shared out.
    """

    linear: PackedLinear
    per_token: int
    renormalises: bool
    first: int = 0

    def fixed(self) -> "ExpertRouter":
        """Returns the batch-invariant form; see `Mlp`."""
        return dataclasses.replace(self, linear=self.linear.fixed())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns experts and weights [T, per_token] for logits [T, experts]; see `kernels.reference.moe.route`."""
        return ops.route(logits, self.per_token, renormalises=self.renormalises)


class SeparateExperts:
    """Computes expert by expert; reads the routing on the host."""

    def __init__(self, router: ExpertRouter, each: Sequence[DenseMlp]) -> None:
        self._router = router
        self._each = each

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        return self.add_into(h, h, eps)

    def add_into(self, to: Tensor, h: Tensor, eps: float) -> Tensor:
        """Implements `Experts.add_into`."""
        router = self._router
        logits = ops.linear_normed(h, self._each[0].norm, eps, router.linear)
        experts, shares = router.choose(logits)
        choices = experts.flatten() - router.first
        here = ((choices >= 0) & (choices < len(self._each))).nonzero()[:, 0]
        if not len(here):
            return to
        order = here[choices[here].argsort(stable=True)]  # order of the choices by expert
        counts = choices[here].bincount(minlength=len(self._each)).tolist()
        chosen = [(one, num) for one, num in zip(self._each, counts, strict=True) if num]
        rows = torch.split(h[order // router.per_token], [num for _, num in chosen])
        found = torch.cat([self._apply(one, own, eps) for (one, _), own in zip(chosen, rows, strict=True)])
        return to.add_(moe.combine(found.new_zeros(len(choices), found.shape[1]).index_copy_(0, order, found), shares))

    def fixed(self) -> "SeparateExperts":
        """Implements `Mlp.fixed`."""
        return SeparateExperts(self._router.fixed(), [one.fixed() for one in self._each])

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return tuple(one for expert in self._each for one in expert.matrices)

    def _apply(self, expert: DenseMlp, x: Tensor, eps: float) -> Tensor:
        """Returns x [M, hidden] after one expert."""
        inner = ops.linear_gated(x, expert.norm, eps, expert.gate_up, expert.activation)
        return ops.linear(inner, expert.down)


class NativeExperts:
    """Computes routing and experts in one call, which can be a part of a decoder layer's call.

    All experts have the same format and sizes, and all of their linears are `NativeLinear`, as is the router's; see
    `takes`.
    """

    def __init__(self, router: ExpertRouter, each: Sequence[DenseMlp]) -> None:
        self._router = router
        self._each = each
        gather(self._linears)  # a layer at a time: for a moment these weights are there twice

    @staticmethod
    def takes(router: ExpertRouter, each: Sequence[DenseMlp]) -> bool:
        """Returns whether one call can compute these experts."""
        forms = {(_form(one.gate_up), _form(one.down)) for one in each}
        is_native = None not in (*next(iter(forms)), _form(router.linear))
        return is_native and len(forms) == 1 and all(one.down_norm is None for one in each)

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        return self.add_into(h, h, eps)

    def add_into(self, to: Tensor, h: Tensor, eps: float) -> Tensor:
        """Implements `Experts.add_into`."""
        native.experts_into(self.arguments, eps, h, to, self._held)
        return to

    def fixed(self) -> "NativeExperts":
        """Implements `Mlp.fixed`: the kernels are batch-invariant."""
        return self

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return self._linears

    @property
    def per_token(self) -> int:
        """Experts that a token is routed to."""
        return self._router.per_token

    @property
    def _linears(self) -> tuple[PackedLinear, ...]:
        """The linears of all experts, in their order."""
        return tuple(linear for one in self._each for linear in (one.gate_up, one.down))

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """The arguments that stay from call to call, in the order that kernels/cpu/module.cpp reads.

        The linears of the first expert, the gate, and the address of the router's numbers.
        """
        first, norm = self._each[0], 0 if self._norm is None else self._norm.data_ptr()
        gate = native.GATES[first.activation]
        return (*_numbers(first.gate_up), norm, *_numbers(first.down), 0, gate, self._table.data_ptr())

    @property
    def _held(self) -> range:
        """The experts that are here."""
        return range(self._router.first, self._router.first + len(self._each))

    @functools.cached_property
    def _norm(self) -> Tensor | None:
        """The norm before router and experts, in float32."""
        norm = self._each[0].norm
        return None if norm is None else norm.float()

    @functools.cached_property
    def _table(self) -> Tensor:
        """The router's numbers, then weight and bias of each expert's linears: int64, as in kernels/cpu/experts.h."""
        router, norm = self._router, 0 if self._norm is None else self._norm.data_ptr()
        own = (*_numbers(router.linear), norm, min(router.per_token, router.linear.features), int(router.renormalises))
        addresses = [address for linear in self._linears for address in _numbers(linear)[1:3]]
        return torch.tensor([*own, *addresses], dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """Routed experts beside one that every token goes through.

    Attributes:
        routed: the routed experts, behind the same norm.
        shared: the expert of all tokens.
        gate: projection to one number, whose sigmoid weights the shared expert's output.
    """

    routed: Experts
    shared: DenseMlp
    gate: PackedLinear

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        return self.add_into(h, h, eps)

    def add_into(self, to: Tensor, h: Tensor, eps: float) -> Tensor:
        """Implements `Experts.add_into`."""
        own = self.shared
        inner = ops.linear_gated(h, own.norm, eps, own.gate_up, own.activation)
        logits = ops.linear_normed(h, own.norm, eps, self.gate).float()
        # A softmax over the logit and 0 is its sigmoid. Torch computes it row by row, a sigmoid over all rows at once:
        # there a row's last bit depends on its place.
        share = F.softmax(F.pad(logits, (0, 1)), dim=-1)[:, :1]
        found = ops.linear(inner, own.down).float() * share
        return self.routed.add_into(to, h, eps).add_(found)

    def fixed(self) -> "SharedExpert":
        """Implements `Mlp.fixed`."""
        return SharedExpert(self.routed.fixed(), self.shared.fixed(), self.gate.fixed())

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return (*self.routed.matrices, *self.shared.matrices)


@dataclasses.dataclass(frozen=True)
class StackedExperts:
    """Computes all experts at once; the launched kernels do not depend on the routing, so a step can be recorded."""

    router: ExpertRouter
    norm: Tensor | None
    gate_up: ExpertStack
    down: ExpertStack
    activation: str
    is_fixed: bool = False
    library_tokens: int | None = None  # from which torch's library computes, unless fixed; None for none

    def fixed(self) -> "StackedExperts":
        """Implements `Mlp.fixed`."""
        return dataclasses.replace(self, router=self.router.fixed(), is_fixed=True)

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return (self.gate_up, self.down)

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        return self.add_into(h, h, eps)

    def add_into(self, to: Tensor, h: Tensor, eps: float) -> Tensor:
        """Implements `Experts.add_into`."""
        x = ops.rms_norm(h, self.norm, eps, self.router.linear.dtype)
        experts, shares = self.router.choose(ops.linear(x, self.router.linear))
        given = self.gate_up, self.down, experts, shares, self.activation
        if self.library_tokens is not None and len(x) >= self.library_tokens and not self.is_fixed:
            return to.add_(experts_by_library(x, *given))
        return to.add_(ops.experts_mlp(x, *given, is_fixed=self.is_fixed))


@dataclasses.dataclass(frozen=True)
class SummedExperts:
    """The experts of ranks that share them out: whole ones, or a part of each.

    Attributes:
        shards: this rank's, each behind the same norm and router.
        sums: with the other ranks.
    """

    shards: Sequence[Experts]
    sums: RankSums

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        partials = self.sums.room(*h.shape)
        for shard, part in zip(self.shards, partials, strict=True):
            shard.add_into(part.zero_(), h, eps)
        self.sums.add(h, partials)
        return h

    def fixed(self) -> "SummedExperts":
        """Implements `Mlp.fixed`."""
        return SummedExperts([one.fixed() for one in self.shards], self.sums)

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return tuple(one for shard in self.shards for one in shard.matrices)


def pack_experts(router: ExpertRouter, each: Sequence[DenseMlp]) -> Experts:
    """Returns the experts `each` of a layer behind their router and their norm.

    Raises ValueError if no kernel takes their format.
    """
    forms = {type(linear) for one in each for linear in (one.gate_up, one.down)}
    if not any(issubclass(form, GpuLinear) for form in forms):
        return (NativeExperts if NativeExperts.takes(router, each) else SeparateExperts)(router, each)
    stack = STACKS.get(forms.pop()) if len(forms) == 1 else None
    if stack is None:
        raise ValueError(f"no kernel takes experts of {each[0].gate_up.kernel}")
    if len(each) < router.linear.features:
        raise ValueError("experts are not shared out among ranks of a GPU")
    gate_up, down = stack([one.gate_up for one in each]), stack([one.down for one in each])
    activation = each[0].activation
    least = library_tokens(gate_up, down, router.per_token, activation)
    return StackedExperts(router, each[0].norm, gate_up, down, activation, library_tokens=least)


def _form(linear: PackedLinear) -> tuple[int, int, int] | None:
    """Returns format, inputs and outputs of a linear of the C++ kernels, None of another one."""
    if not isinstance(linear, NativeLinear):
        return None
    form, _, _, inputs, outputs = linear.arguments
    return form, inputs, outputs


def _numbers(linear: PackedLinear) -> tuple[int, ...]:
    assert isinstance(linear, NativeLinear)
    return linear.arguments


def _plain(each: Sequence[PackedLinear]) -> ExpertStack:
    return ExpertStack(torch.stack([one.weight for one in each]), bias=_biases(each))


def _eight_bits(each: Sequence[PackedLinear]) -> ExpertStack:
    packed = [rows_of_8(one.packed) for one in each if isinstance(one, Int8OnGpu)]  # true for all of them
    scales = torch.stack([one.scales for one in packed])
    return ExpertStack(torch.stack([one.weight for one in packed]), scales, _biases(each))


def _biases(each: Sequence[PackedLinear]) -> Tensor | None:
    found = [one.bias for one in each if one.bias is not None]
    return torch.stack(found) if found else None


STACKS: Mapping[type[PackedLinear], Callable[[Sequence[PackedLinear]], ExpertStack]] = {
    PlainOnGpu: _plain,
    Int8OnGpu: _eight_bits,
}
