"""Mixture-of-experts MLPs (Shazeer et al.

2017): a router chooses experts per token; their outputs are weighted and added.

Two forms. `SeparateExperts` multiplies expert by expert with the linears of a dense layer, whose rows do not depend on
other tokens. `StackedExperts` uses kernels that take all experts at once, so that the host does not wait for the
routing. Takes packed linears and numbers; tensor names are in `mlp_weights`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.kernels import ops
from sluice_server.kernels.formats.gpu_linear import Int8OnGpu
from sluice_server.kernels.formats.linear import GpuLinear, PackedLinear
from sluice_server.kernels.reference import moe
from sluice_server.kernels.reference.moe import ExpertStack


@dataclasses.dataclass(frozen=True)
class Router:
    """Routes tokens to experts.

    Attributes:
        linear: projection to a logit per expert.
        per_token: experts that a token is routed to.
        renormalises: whether their weights are scaled to add up to 1.
    """

    linear: PackedLinear
    per_token: int
    renormalises: bool

    def fixed(self) -> "Router":
        """Returns the batch-invariant form; see `Mlp`."""
        return dataclasses.replace(self, linear=self.linear.fixed())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns experts and weights [T, per_token] for logits [T, experts]; see `kernels.reference.moe.route`."""
        return ops.route(logits, self.per_token, renormalises=self.renormalises)


class SeparateExperts:
    """Computes expert by expert; reads the routing on the host."""

    def __init__(self, router: Router, each: Sequence[DenseMlp]) -> None:
        self._router = router
        self._each = each

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        router = self._router
        logits = ops.linear_normed(h, self._each[0].norm, eps, router.linear)
        experts, shares = router.choose(logits)
        order = experts.flatten().argsort(stable=True)  # order of the choices by expert
        counts = experts.flatten().bincount(minlength=len(self._each)).tolist()
        chosen = [(one, num) for one, num in zip(self._each, counts, strict=True) if num]
        rows = torch.split(h[order // router.per_token], [num for _, num in chosen])
        found = torch.cat([self._apply(one, own, eps) for (one, _), own in zip(chosen, rows, strict=True)])
        return h.add_(moe.combine(torch.empty_like(found).index_copy_(0, order, found), shares))

    def fixed(self) -> "SeparateExperts":
        """Implements `Mlp.fixed`."""
        return SeparateExperts(self._router.fixed(), [one.fixed() for one in self._each])

    def _apply(self, expert: DenseMlp, x: Tensor, eps: float) -> Tensor:
        """Returns x [M, hidden] after one expert."""
        inner = ops.linear_gated(x, expert.norm, eps, expert.gate_up, expert.activation)
        return ops.linear(inner, expert.down)


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """Routed experts beside one that every token goes through.

    Attributes:
        routed: the routed experts, behind the same norm.
        shared: the expert of all tokens.
        gate: projection to one number, whose sigmoid weights the shared expert's output.
    """

    routed: Mlp
    shared: DenseMlp
    gate: PackedLinear

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        own = self.shared
        inner = ops.linear_gated(h, own.norm, eps, own.gate_up, own.activation)
        logits = ops.linear_normed(h, own.norm, eps, self.gate).float()
        # A softmax over the logit and 0 is its sigmoid. Torch computes it row by row, a sigmoid over all rows at once:
        # there a row's last bit depends on its place.
        share = F.softmax(F.pad(logits, (0, 1)), dim=-1)[:, :1]
        found = ops.linear(inner, own.down).float() * share
        return self.routed.add_to(h, eps).add_(found)

    def fixed(self) -> "SharedExpert":
        """Implements `Mlp.fixed`."""
        return SharedExpert(self.routed.fixed(), self.shared.fixed(), self.gate.fixed())


@dataclasses.dataclass(frozen=True)
class StackedExperts:
    """Computes all experts at once; the launched kernels do not depend on the routing, so a step can be recorded."""

    router: Router
    norm: Tensor | None
    gate_up: ExpertStack
    down: ExpertStack
    activation: str
    is_fixed: bool = False

    def fixed(self) -> "StackedExperts":
        """Implements `Mlp.fixed`."""
        return dataclasses.replace(self, router=self.router.fixed(), is_fixed=True)

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        x = ops.rms_norm(h, self.norm, eps, self.router.linear.dtype)
        experts, shares = self.router.choose(ops.linear(x, self.router.linear))
        given = self.gate_up, self.down, experts, shares, self.activation
        return h.add_(ops.experts_mlp(x, *given, is_fixed=self.is_fixed))


def pack_experts(router: Router, each: Sequence[DenseMlp]) -> Mlp:
    """Returns the experts `each` of a layer behind their router and their norm.

    Raises ValueError if no kernel takes their format.
    """
    forms = {type(linear) for one in each for linear in (one.gate_up, one.down)}
    if not any(issubclass(form, GpuLinear) for form in forms):
        return SeparateExperts(router, each)
    stack = STACKS.get(forms.pop()) if len(forms) == 1 else None
    if stack is None:
        raise ValueError(f"no kernel takes experts of {each[0].gate_up.kernel}")
    gate_up, down = stack([one.gate_up for one in each]), stack([one.down for one in each])
    return StackedExperts(router, each[0].norm, gate_up, down, each[0].activation)


def _plain(each: Sequence[PackedLinear]) -> ExpertStack:
    return ExpertStack(torch.stack([one.weight for one in each]), bias=_biases(each))


def _eight_bits(each: Sequence[PackedLinear]) -> ExpertStack:
    packed = [one.packed for one in each if isinstance(one, Int8OnGpu)]  # true for all of them
    scales = torch.stack([one.scales for one in packed])
    return ExpertStack(torch.stack([one.weight for one in packed]), scales, _biases(each))


def _biases(each: Sequence[PackedLinear]) -> Tensor | None:
    found = [one.bias for one in each if one.bias is not None]
    return torch.stack(found) if found else None


STACKS: Mapping[type[PackedLinear], Callable[[Sequence[PackedLinear]], ExpertStack]] = {
    GpuLinear: _plain,
    Int8OnGpu: _eight_bits,
}
