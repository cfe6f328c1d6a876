"""Experts: choices grouped by expert, products with each expert's weights, and their sum."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.formats import packed_weights
from sluice_server.kernels.reference import moe
from sluice_server.kernels.reference.moe import ExpertStack
from sluice_server.kernels.triton import activation
from sluice_server.kernels.triton import moe as kernels
from tests.kernels.triton.harness import assert_close, caught

DTYPES = [torch.float32, torch.float16]


def chosen(tokens: int, num_experts: int, per_token: int) -> Tensor:
    """Distinct experts of each token, int64 [tokens, per_token]; no token chooses the last expert."""
    torch.manual_seed(tokens)
    return torch.rand(tokens, max(1, num_experts - 1)).argsort(dim=1)[:, :per_token]


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(("num", "num_experts"), [(1, 1), (33, 8), (70, 60), (1500, 5), (0, 8)])
def test_every_choice_is_in_a_group_of_its_expert_once(num: int, num_experts: int, size: int) -> None:
    experts = torch.randint(0, num_experts, (num,), generator=torch.Generator().manual_seed(num))
    if num == 33:
        experts[:] = 3  # all of one
    found, reference = kernels.group(experts, num_experts, size), moe.group(experts, num_experts, size)
    assert found.size == size and len(found.experts) == moe.num_groups(num, num_experts, size)
    assert torch.equal(found.experts, reference.experts)
    every = [groups.choices.view(-1, size).sort(dim=1).values for groups in (found, reference)]
    by_expert = [
        [groups.choices.view(-1, size)[groups.experts == expert] for expert in range(num_experts)]
        for groups in (found, reference)
    ]
    for own, wanted in zip(*by_expert, strict=True):
        assert torch.equal(own.flatten().sort().values, wanted.flatten().sort().values)
    assert sorted(every[0][every[0] >= 0].tolist()) == list(range(num))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(1, 8, 2), (5, 3, 1), (40, 4, 2)])
def test_each_choice_meets_its_experts_weights(
    tokens: int, num_experts: int, per_token: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, x = chosen(tokens, num_experts, per_token), torch.randn(tokens, 70).to(dtype)
    weight, num = torch.randn(num_experts, 33, 70).to(dtype), tokens * per_token
    flat = experts.flatten()
    wanted = torch.einsum("ck,cnk->cn", x.double()[torch.arange(num) // per_token], weight.double()[flat])
    groups = kernels.group(flat, num_experts, kernels.tiles_of(num, num_experts).m)
    made = caught(monkeypatch, kernels)
    kernels.grouped_linear(x, weight, None, groups, num, per_token)
    assert_close(made[0].check(), wanted, dtype)
    assert_close(moe.grouped_linear(x, weight, None, groups, num, per_token), wanted, dtype)


def test_weights_of_8_bits() -> None:
    experts, x = chosen(9, 4, 2).flatten(), torch.randn(9, 96).half()
    packed = packed_weights.quantise_rows(torch.randn(4 * 20, 96), torch.int8)
    weight, scales = packed.weight.view(4, 20, 96), packed.scales.view(4, 20)
    groups = kernels.group(experts, 4, 16)
    wanted = moe.grouped_linear(x.double(), weight, scales, groups, 18, 2)
    assert_close(kernels.grouped_linear(x, weight, scales, groups, 18, 2), wanted, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (7, 111), (2, 1100)])
def test_results_are_added_by_share(
    tokens: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    y, shares = torch.randn(tokens * 3, width).to(dtype), torch.rand(tokens, 3)
    made = caught(monkeypatch, kernels)
    kernels.combine(y, shares)
    wanted = (y.view(tokens, 3, width).double() * shares.double()[:, :, None]).sum(1)
    assert_close(made[0].check(), wanted, dtype)


@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(1, 8, 2), (21, 5, 3), (0, 4, 2)])
def test_a_whole_layer(tokens: int, num_experts: int, per_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x = chosen(tokens, num_experts, per_token), torch.randn(tokens, 48).half()
    shares = torch.rand(tokens, per_token).softmax(1)
    gate_up = ExpertStack(torch.randn(num_experts, 80, 48).half() / 7)
    down = ExpertStack(torch.randn(num_experts, 48, 40).half() / 7)
    wanted = ops.experts_mlp(x, gate_up, down, experts, shares)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    assert_close(ops.experts_mlp(x, gate_up, down, experts, shares), wanted.double(), torch.float16)
    assert activation.silu_mul(torch.zeros(1, 4)).shape == (1, 2)


def test_tiles_may_be_the_same_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, shares = torch.zeros(600, 1, dtype=torch.int64), torch.ones(600, 1)
    sizes = []
    monkeypatch.setattr(kernels, "group", lambda experts, num, size: sizes.append(size))
    monkeypatch.setattr(kernels, "GATES", {"silu": lambda _: None})
    for name in ("grouped_linear", "combine"):
        monkeypatch.setattr(kernels, name, lambda *_: None)
    stack = ExpertStack(torch.zeros(2, 4, 4))
    for num in (1, 600):
        for is_fixed in (False, True):
            kernels.experts_mlp(torch.zeros(num, 4), stack, stack, experts[:num], shares[:num], is_fixed=is_fixed)
    assert sizes == [16, 16, 128, 16]


def test_tiles_follow_the_choices_of_an_expert() -> None:
    assert [kernels.tiles_of(num, 8).m for num in (1, 255, 256, 512)] == [16, 16, 64, 128]
    with pytest.raises(ValueError, match="groups of 24: a multiple of 16"):
        groups = moe.group(torch.zeros(3, dtype=torch.int64), 1, 24)
        kernels.grouped_linear(torch.zeros(3, 16), torch.zeros(1, 16, 16), None, groups, 3, 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(222, 60, 6), (300, 8, 8), (33, 256, 8)])
def test_larger_layers(tokens: int, num_experts: int, per_token: int) -> None:
    experts, x = chosen(tokens, num_experts + 1, per_token), torch.randn(tokens, 64)
    shares = torch.rand(tokens, per_token).softmax(1)
    gate_up, down = torch.randn(num_experts, 64, 64) / 8, torch.randn(num_experts, 64, 32) / 8
    wanted = moe.experts_mlp(x.double(), ExpertStack(gate_up.double()), ExpertStack(down.double()), experts, shares)
    found = kernels.experts_mlp(x, ExpertStack(gate_up), ExpertStack(down), experts, shares)
    assert_close(found, wanted.double(), torch.float32, 4.0)
