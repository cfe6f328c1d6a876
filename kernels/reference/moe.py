"""Mixture of experts: the torch twins of routing tokens to experts and of products with each expert's weights.

Takes what a router chose. Knows no router and no model.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.reference.elementwise import GATES

NOBODY = -1  # a place of a group behind its last one, and the expert of a group that is not there


class ExpertStack(NamedTuple):
    """Weights of all experts of a layer.

    Attributes:
        weight: [E, N, K], of the activations' dtype, or int8 with `scales`.
        scales: float32 [E, N], of int8 weights.
        bias: [E, N].
    """

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    def biased(self, y: Tensor, experts: Tensor) -> Tensor:
        """y [C, N] of choices int64 [C], with the bias of each."""
        return y if self.bias is None else y + self.bias[experts]


class ExpertGroups(NamedTuple):
    """Choices (token, expert) in groups of one expert each.

    Attributes:
        choices: int32 [G · size], indices of choices, NOBODY behind an expert's last.
        experts: int32 [G], NOBODY behind the last group.
        size: choices of a group.
    """

    choices: Tensor
    experts: Tensor
    size: int


def route(logits: Tensor, per_token: int, *, renormalises: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token takes, the likeliest first, and their shares: int64 and float32 [T, per_token].

    Shares are of a softmax over logits [T, E] in float32; if `renormalises`, those of a token add up to 1. Of experts
    that are alike the first are taken: `torch.topk` takes others with another library, device or number of experts.
    """
    shares, experts = F.softmax(logits, dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :per_token], experts[:, :per_token]
    return experts, shares / shares.sum(-1, keepdim=True) if renormalises else shares


def group(experts: Tensor, num_experts: int, size: int) -> ExpertGroups:
    """Put choices int64 [C] of experts in groups of `size`: as many as there could be, whatever was chosen."""
    num = num_groups(len(experts), num_experts, size)
    choices = torch.full((num * size,), NOBODY, dtype=torch.int32, device=experts.device)
    owners = torch.full((num,), NOBODY, dtype=torch.int32, device=experts.device)
    at = 0
    for expert in range(num_experts):
        own = (experts == expert).nonzero()[:, 0].int()
        needed = -(-len(own) // size)
        choices[at * size : at * size + len(own)] = own
        owners[at : at + needed] = expert
        at += needed
    return ExpertGroups(choices, owners, size)


def num_groups(num_choices: int, num_experts: int, size: int) -> int:
    """Groups that choices could need: a group of its own for each choice, or a last one not full for each expert."""
    return min(num_choices, num_choices // size + num_experts)


def grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, groups: ExpertGroups, num_choices: int, per_token: int
) -> Tensor:
    """Each choice's input times its expert's weights.

    Args:
        x: [T, K]; choice c takes row c // per_token.
        weight: [E, N, K], of x's dtype, or int8 with `scales`.
        scales: float32 [E, N], of int8 weights.
        groups: of the choices; a choice that is in none gets no result.

    Returns:
        [num_choices, N] in x's dtype.
    """
    y = x.new_zeros(num_choices, weight.shape[1])
    for at, expert in enumerate(groups.experts.tolist()):
        own = groups.choices[at * groups.size : (at + 1) * groups.size].long()
        own = own[own != NOBODY]
        if len(own):
            product = x[own // per_token].float() @ weight[expert].float().t()
            y[own] = (product if scales is None else product * scales[expert]).to(x.dtype)
    return y


def combine(y: Tensor, shares: Tensor) -> Tensor:
    """Σ over a token's choices of share · result: y [T · k, N], shares [T, k] → [T, N]. Added one after the other: the
    order of torch's sums may follow from the shape."""
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
    """The MLPs of the experts that each token chose, by its shares.

    Args:
        x: [T, K].
        gate_up, down: of weights [E, 2 I, K] and [E, K, I].
        experts: int64 [T, k], distinct in a row.
        shares: [T, k].
        activation: of the gate, one of `kernels.reference.elementwise.GATES`.
        is_fixed: by tiles that do not follow the number of tokens, where a GPU has several; here there is one way.
    """
    num, per_token, chosen = experts.numel(), experts.shape[1], experts.flatten()
    groups = group(chosen, len(gate_up.weight), 16)
    halves = gate_up.biased(grouped_linear(x, gate_up.weight, gate_up.scales, groups, num, per_token), chosen)
    inner = GATES[activation](halves.float()).to(x.dtype)
    return combine(down.biased(grouped_linear(inner, down.weight, down.scales, groups, num, 1), chosen), shares)
