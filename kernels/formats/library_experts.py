"""Experts by torch's library (`torch._grouped_mm`) instead of our kernel, for the many tokens of prompts.

Measured once for each shape, at load, as in `library_product`; the same rules hold. Choices are sorted by expert on the
device, so that nothing waits for the host and a step can be recorded. That needs a GPU on which the library takes the
ends of groups from the device: compute capability 9 or 10. Elsewhere torch would fetch them, and it is not asked.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.library_product import MULTIPLE, device_seconds, least_faster
from sluice_server.kernels.reference.moe import ExpertStack

TOKENS = (64, 256, 1024, 4096)  # numbers of tokens that are measured
CAPABILITIES = (9, 10)  # major


def experts_by_library(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, shares: Tensor, activation: str
) -> Tensor:
    """Computes the MLPs of the experts chosen for each token; see `kernels.reference.moe.experts_mlp`. Stacks have no
    scales."""
    moe, gates = gpu.family("moe"), gpu.family("activation").GATES
    chosen, order = experts.flatten().sort(stable=True)
    num = torch.arange(len(gate_up.weight), device=x.device)
    ends = torch.searchsorted(chosen, num, right=True).int()
    each = x[order // experts.shape[1]]
    halves = gate_up.biased(torch._grouped_mm(each, gate_up.weight.transpose(1, 2), offs=ends), chosen)
    inner = gates[activation](halves.to(x.dtype))
    found = down.biased(torch._grouped_mm(inner, down.weight.transpose(1, 2), offs=ends), chosen).to(x.dtype)
    y: Tensor = moe.combine(torch.empty_like(found).index_copy_(0, order, found), shares)
    return y


def library_tokens(gate_up: ExpertStack, down: ExpertStack, per_token: int, activation: str) -> int | None:
    """Returns the least number of tokens for which the library computes experts; None if it never does."""
    weight = gate_up.weight
    if gate_up.scales is not None or weight.dtype is not torch.bfloat16 or not weight.is_cuda:
        return None
    if torch.cuda.get_device_capability(weight.device)[0] not in CAPABILITIES:
        return None
    return _measured((tuple(weight.shape), tuple(down.weight.shape)), per_token, activation, weight.device)


@functools.cache
def _measured(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], per_token: int, activation: str, device: torch.device
) -> int | None:
    if any(size % MULTIPLE for shape in shapes for size in shape[1:]):
        return None
    wide = [torch.randn(shape, dtype=torch.bfloat16, device=device) / shape[2] ** 0.5 for shape in shapes]
    stacks, num_experts = [ExpertStack(one) for one in wide], shapes[0][0]

    def given(num: int) -> tuple[Any, ...]:
        x = torch.randn(num, shapes[0][2], dtype=torch.bfloat16, device=device)
        experts = torch.rand(num, num_experts, device=device).argsort(1)[:, :per_token]
        shares = torch.full((num, per_token), 1 / per_token, device=device)
        return (x, *stacks, experts, shares, activation)

    kernel = gpu.family("moe").experts_mlp
    return least_faster(TOKENS, given, kernel, experts_by_library, device_seconds, "experts")
