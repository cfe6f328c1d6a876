"""Experts by torch's library: the same numbers as ours, without waiting for the host; asked only where it is fit."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats import library_experts
from sluice_server.kernels.formats.library_experts import experts_by_library, library_tokens
from sluice_server.kernels.reference import elementwise, moe
from sluice_server.kernels.reference.moe import ExpertStack

NUM, HIDDEN, INNER, PER_TOKEN = 5, 32, 48, 2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {"moe": moe, "activation": elementwise}
    monkeypatch.setattr(gpu, "family", lambda name: families[name])


def stacks(*, biased: bool) -> tuple[ExpertStack, ExpertStack]:
    torch.manual_seed(3)
    shapes = (NUM, 2 * INNER, HIDDEN), (NUM, HIDDEN, INNER)
    made = [(torch.randn(shape).to(BF16) / shape[2] ** 0.5, torch.randn(shape[:2]).to(BF16)) for shape in shapes]
    first, second = (ExpertStack(weight, bias=bias if biased else None) for weight, bias in made)
    return first, second


def choices(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that none of takes expert 3: an empty group in between."""
    allowed = torch.tensor([0, 1, 2, 4])
    experts = torch.stack([allowed[torch.randperm(4)[:PER_TOKEN]] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN).to(BF16), experts, torch.rand(tokens, PER_TOKEN)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_they_compute_the_same(tokens: int, biased: bool) -> None:
    gate_up, down = stacks(biased=biased)
    x, experts, shares = choices(tokens)
    found = experts_by_library(x, gate_up, down, experts, shares, "silu")
    want = moe.experts_mlp(x, gate_up, down, experts, shares)
    assert found.dtype is BF16 and found.shape == x.shape
    assert (found.float() - want.float()).abs().max() < 0.02 * want.float().abs().max()


def on(capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device of this capability, where measuring says 256; returns what is measured."""
    asked: list[Any] = []

    def measured(*given: object) -> int:
        asked.append(given[:3])
        return 256

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(library_experts, "_measured", measured)
    return asked


def stack_of(dtype: torch.dtype, shape: tuple[int, ...], scales: Tensor | None = None) -> Any:  # noqa: ANN401 # as a stack
    weight = types.SimpleNamespace(dtype=dtype, shape=shape, device="cuda", is_cuda=True)
    return types.SimpleNamespace(weight=weight, scales=scales)


@pytest.mark.parametrize(
    ("capability", "dtype", "scales", "found"),
    [
        (9, BF16, None, 256),
        (10, BF16, None, 256),
        (8, BF16, None, None),  # torch would fetch the ends of groups
        (12, BF16, None, None),
        (9, torch.float16, None, None),
        (9, BF16, torch.ones(1), None),
    ],
)
def test_it_is_measured_where_torch_takes_the_ends_of_groups_from_the_device(
    capability: int, dtype: torch.dtype, scales: Tensor | None, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = on(capability, monkeypatch)
    one, other = stack_of(dtype, (4, 64, 32), scales), stack_of(dtype, (4, 32, 32), scales)
    assert library_tokens(one, other, 2, "silu") == found
    assert asked == ([(((4, 64, 32), (4, 32, 32)), 2, "silu")] if found else [])


def test_on_a_cpu_there_is_nothing_to_measure() -> None:
    assert library_tokens(*stacks(biased=False), PER_TOKEN, "silu") is None
