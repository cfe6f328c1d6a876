"""MLPs of which each token takes a few (Shazeer et al. 2017): a router chooses, what was chosen is weighed and added.

In two forms, by what multiplies one expert: apart, by the linears of a dense layer, whose rows do not depend on who
chose the same expert; or stacked, by kernels that take all experts at once, so that no choice is waited for. Packed
linears and numbers in. Knows no model's names.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.kernels import ops
from sluice_server.kernels.formats.gpu_linear import Int8OnGpu
from sluice_server.kernels.formats.linear import GpuLinear, PackedLinear
from sluice_server.kernels.reference import moe
from sluice_server.kernels.reference.moe import ExpertStack


@dataclasses.dataclass(frozen=True)
class Router:
    """Attributes:
    linear: to a logit for each expert.
    per_token: experts that a token takes.
    renormalises: whether the shares of those add up to 1.
    """

    linear: PackedLinear
    per_token: int
    renormalises: bool

    def fixed(self) -> "Router":
        """See `Mlp`."""
        return dataclasses.replace(self, linear=self.linear.fixed())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and shares [T, per_token] by logits [T, experts]; see `kernels.reference.moe.route`."""
        return ops.route(logits, self.per_token, renormalises=self.renormalises)


class SeparateExperts:
    """Expert by expert: for a device whose numbers can be looked at."""

    def __init__(self, router: Router, each: Sequence[DenseMlp]) -> None:
        self._router = router
        self._each = each

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """See `Mlp`."""
        router = self._router
        logits = ops.linear_normed(h, self._each[0].norm, eps, router.linear)
        experts, shares = router.choose(logits)
        order = experts.flatten().argsort(stable=True)  # of choices, by expert
        counts = experts.flatten().bincount(minlength=len(self._each)).tolist()
        chosen = [(one, num) for one, num in zip(self._each, counts, strict=True) if num]
        rows = torch.split(h[order // router.per_token], [num for _, num in chosen])
        found = torch.cat([self._apply(one, own, eps) for (one, _), own in zip(chosen, rows, strict=True)])
        return h.add_(moe.combine(torch.empty_like(found).index_copy_(0, order, found), shares))

    def fixed(self) -> "SeparateExperts":
        """See `Mlp`."""
        return SeparateExperts(self._router.fixed(), [one.fixed() for one in self._each])

    def _apply(self, expert: DenseMlp, x: Tensor, eps: float) -> Tensor:
        """x [M, hidden] through one expert."""
        inner = ops.linear_gated(x, expert.norm, eps, expert.gate_up, expert.activation)
        return ops.linear(inner, expert.down)


@dataclasses.dataclass(frozen=True)
class StackedExperts:
    """All at once: what is launched does not depend on what was chosen, so that it can be recorded."""

    router: Router
    norm: Tensor | None
    gate_up: ExpertStack
    down: ExpertStack
    activation: str
    is_fixed: bool = False

    def fixed(self) -> "StackedExperts":
        """See `Mlp`."""
        return dataclasses.replace(self, router=self.router.fixed(), is_fixed=True)

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """See `Mlp`."""
        x = ops.rms_norm(h, self.norm, eps, self.router.linear.dtype)
        experts, shares = self.router.choose(ops.linear(x, self.router.linear))
        given = self.gate_up, self.down, experts, shares, self.activation
        return h.add_(ops.experts_mlp(x, *given, is_fixed=self.is_fixed))


def pack_experts(router: Router, each: Sequence[DenseMlp]) -> Mlp:
    """The MLPs of a layer behind their router and the same norm. Raises ValueError where nothing multiplies them."""
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
    packed = [one.packed for one in each if isinstance(one, Int8OnGpu)]  # which all of them are
    scales = torch.stack([one.scales for one in packed])
    return ExpertStack(torch.stack([one.weight for one in packed]), scales, _biases(each))


def _biases(each: Sequence[PackedLinear]) -> Tensor | None:
    found = [one.bias for one in each if one.bias is not None]
    return torch.stack(found) if found else None


STACKS: Mapping[type[PackedLinear], Callable[[Sequence[PackedLinear]], ExpertStack]] = {
    GpuLinear: _plain,
    Int8OnGpu: _eight_bits,
}
