"""Muon's directions are near orthogonal, AdamW's first step is one rate long, and all optimiser state has a name."""

import pytest
import torch
from torch import nn

from sluice_server.demo.optimiser import Optimiser, orthogonal


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 6, 12), (3, 12, 6)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(stack))
    assert stack.shape == orthogonal(stack).shape
    assert values.max() < 1.3 and values.median() > 0.6


def test_the_first_adam_step_is_one_rate_against_the_gradient() -> None:
    model = nn.RMSNorm(4)
    optimiser = Optimiser(model, matrix_rate=1.0, other_rate=0.1, weight_decay=0.5)
    model.weight.grad = torch.tensor([1.0, -2.0, 3.0, -0.5])
    optimiser.step(0, factor=0.5)
    assert model.weight.tolist() == pytest.approx([0.95, 1.05, 0.95, 1.05], abs=1e-5)
    assert model.weight.grad is None


def test_matrices_go_to_muon_and_decay() -> None:
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optimiser = Optimiser(model, matrix_rate=0.1, other_rate=0.0, weight_decay=0.5)
    model.weight.grad = torch.zeros(4, 4)
    optimiser.step(0, factor=1.0)
    assert torch.allclose(model.weight, before * 0.95)
    assert set(optimiser.state) == {"weight.momentum"}


@pytest.mark.parametrize(("rows", "columns", "longest"), [(4, 4, 1.0), (4, 8, 1.0), (16, 4, 2.0)])
def test_a_matrix_moves_against_its_gradient_as_far_as_its_shape_allows(
    rows: int, columns: int, longest: float
) -> None:
    model = nn.Linear(columns, rows, bias=False)
    before = model.weight.detach().clone()
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(8))
    optimiser = Optimiser(model, matrix_rate=0.1, other_rate=0.0, weight_decay=0.0)
    model.weight.grad = gradient.clone()
    optimiser.step(0, factor=0.5)
    moved = model.weight.detach() - before
    assert (moved * gradient).sum() < 0
    assert torch.linalg.svdvals(moved).max().item() == pytest.approx(0.05 * longest, rel=0.3)
