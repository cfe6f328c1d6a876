"""Mixture of experts: the reference implementations of routing tokens to experts and of products with experts' weights.

Takes the router's logits or choices; independent of the model.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.reference.elementwise import GATES

UNUSED = -1  # marks an unused place of a group, and the expert of an unused group


class ExpertStack(NamedTuple):
    """Weights of all experts of a layer.

    Attributes:
        weight: [E, N, K], in the activations' dtype, or int8 with `scales`.
        scales: float32 [E, N], of int8 weights.
        bias: [E, N].
    """

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    def biased(self, y: Tensor, experts: Tensor) -> Tensor:
        """Returns y [C, N] plus the bias of each choice's expert, given as int64 [C]."""
        return y if self.bias is None else y + self.bias[experts]


class ExpertGroups(NamedTuple):
    """Choices (token, expert) in groups that have one expert each.

    Attributes:
        choices: int32 [G · size], indices of choices, UNUSED after an expert's last choice.
        experts: int32 [G], expert of each group, UNUSED after the last group.
        size: number of choices in a group.
    """

    choices: Tensor
    experts: Tensor
    size: int


def route(logits: Tensor, per_token: int, *, renormalises: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, the likeliest first, and their shares: int64 and float32 [T, per_token].

    Shares are a softmax over logits [T, E] in float32; if `renormalises`, those of a token add up to 1. Among experts
    with equal shares the first ones are taken: `torch.topk` chooses differently with another library, device or number
    of experts.
    """
    shares, experts = F.softmax(logits, dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :per_token], experts[:, :per_token]
    return experts, shares / shares.sum(-1, keepdim=True) if renormalises else shares


def group(experts: Tensor, num_experts: int, size: int) -> ExpertGroups:
    """Puts choices int64 [C] of experts in groups of `size`. Allocates as many groups as any choices could need."""
    num = num_groups(len(experts), num_experts, size)
    choices = torch.full((num * size,), UNUSED, dtype=torch.int32, device=experts.device)
    owners = torch.full((num,), UNUSED, dtype=torch.int32, device=experts.device)
    at = 0
    for expert in range(num_experts):
        own = (experts == expert).nonzero()[:, 0].int()
        needed = -(-len(own) // size)
        choices[at * size : at * size + len(own)] = own
        owners[at : at + needed] = expert
        at += needed
    return ExpertGroups(choices, owners, size)


def num_groups(num_choices: int, num_experts: int, size: int) -> int:
    """Returns the most groups that choices can need: one for each choice, or the full ones and a last one for each
    expert."""
    return min(num_choices, num_choices // size + num_experts)


def grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, groups: ExpertGroups, num_choices: int, per_token: int
) -> Tensor:
    """Multiplies each choice's input by its expert's weights.

    Args:
        x: [T, K]; choice c uses row c // per_token.
        weight: [E, N, K], in x's dtype, or int8 with `scales`.
        scales: float32 [E, N], of int8 weights.
        groups: groups of the choices; the result of a choice that is in none is undefined.

    Returns:
        [num_choices, N] in x's dtype.
    """
    y = x.new_zeros(num_choices, weight.shape[1])
    for at, expert in enumerate(groups.experts.tolist()):
        own = groups.choices[at * groups.size : (at + 1) * groups.size].long()
        own = own[own != UNUSED]
        if len(own):
            product = x[own // per_token].float() @ weight[expert].float().t()
            y[own] = (product if scales is None else product * scales[expert]).to(x.dtype)
    return y


def combine(y: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum over a token's choices of share · result: y [T · k, N], shares [T, k] → [T, N].

    Adds one choice after the other, because the order of torch's sums may depend on the shape.
    """
    tokens, per_token = shares.shape
    each = y.view(tokens, per_token, y.shape[1]).float() * shares.float()[:, :, None]
    total = each[:, 0]
    for choice in range(1, per_token):
        total = total + each[:, choice]
    return total.to(y.dtype)


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
    """Computes the MLPs of the experts chosen for each token, weighted by their shares: [T, K].

    Args:
        x: [T, K].
        gate_up, down: stacks of weights [E, 2 I, K] and [E, K, I].
        experts: int64 [T, k], distinct in a row.
        shares: [T, k].
        activation: the gate's activation, one of `kernels.reference.elementwise.GATES`.
        is_fixed: use tiles that do not depend on the number of tokens, where a GPU has several; ignored here.
    """
    num, per_token, chosen = experts.numel(), experts.shape[1], experts.flatten()
    groups = group(chosen, len(gate_up.weight), 16)
    halves = gate_up.biased(grouped_linear(x, gate_up.weight, gate_up.scales, groups, num, per_token), chosen)
    inner = GATES[activation](halves.float()).to(x.dtype)
    return combine(down.biased(grouped_linear(inner, down.weight, down.scales, groups, num, 1), chosen), shares)
