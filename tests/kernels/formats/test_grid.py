"""The search for the grids of 4-bit weights: never worse than the range of a group, and better where it counts."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats.grid import HIGHEST, grid_of, levels_of
from sluice_server.kernels.formats.quantised import round_weight


def cost(groups: Tensor, scales: Tensor, minima: Tensor, importance: Tensor | None = None) -> Tensor:
    off = (levels_of(groups, scales, minima) * scales.float() + minima.float() - groups).double().square()
    return (off if importance is None else off * importance).sum(2)


def of_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    return ((most - least) / HIGHEST).half(), least.half()


@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("kind", ["normal", "heavy", "offset", "equal", "few"])
def test_a_grid_is_never_worse_than_the_range(kind: str, spread: float) -> None:
    torch.manual_seed(3)
    groups = torch.randn(70, 5, 32)
    if kind == "heavy":
        groups = groups**3
    if kind == "offset":
        groups += 50.0
    if kind == "equal":
        groups = groups[:, :, :1].expand(-1, -1, 32).contiguous()
    if kind == "few":
        groups = groups.round()
    importance = torch.exp2((torch.randn(5, 32) * spread).round())
    found, plain = cost(groups, *grid_of(groups, importance), importance), cost(groups, *of_range(groups), importance)
    assert (found <= plain * 1.0001 + 1e-12).all()
    if kind in ("normal", "heavy"):
        assert found.sum() < (0.93 if spread == 0.0 else 0.8) * plain.sum()


def test_weights_that_are_on_a_grid_already_are_kept() -> None:
    torch.manual_seed(4)
    levels = torch.randint(16, (40, 3, 32)).float()
    levels[:, :, 0], levels[:, :, 1] = 0.0, HIGHEST
    scales, minima = (torch.rand(40, 3, 1) * 0.01).half(), torch.randn(40, 3, 1).half()
    groups = levels * scales.float() + minima.float()
    found = grid_of(groups, torch.rand(3, 32) + 0.1)
    assert torch.equal(levels_of(groups, *found), levels)
    assert torch.allclose(levels * found[0].float() + found[1].float(), groups, rtol=2e-3, atol=2e-3)


def test_an_input_that_is_large_is_rounded_less() -> None:
    torch.manual_seed(5)
    weight, importance = torch.randn(64, 96), torch.ones(96)
    importance[40] = 1000.0
    plain, weighed = ((round_weight(weight, 4, one).dequantise() - weight).square() for one in (None, importance))
    assert weighed[:, 40].sum() < 0.05 * plain[:, 40].sum()
    assert weighed.sum() < 2.0 * plain.sum()
    assert torch.equal(weighed[:, :32], plain[:, :32])  # in other groups nothing changes


@pytest.mark.parametrize("inputs", [5, 40, 64])
def test_an_input_that_was_never_seen_is_rounded_as_well(inputs: int) -> None:
    torch.manual_seed(6)
    weight, importance = torch.randn(16, inputs), torch.ones(inputs)
    importance[inputs // 2 :] = 0.0
    for counts in (importance, torch.zeros(inputs)):
        off = (round_weight(weight, 4, counts).dequantise() - weight).abs()
        assert float(off.max()) < 0.5


def test_bits_do_not_depend_on_how_many_rows_are_searched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    groups, importance = torch.randn(33, 4, 32), torch.exp2(torch.randn(4, 32).round())
    wanted = grid_of(groups, importance)
    monkeypatch.setattr("sluice_server.kernels.formats.grid.AT_ONCE", 200)
    assert all(torch.equal(one, two) for one, two in zip(grid_of(groups, importance), wanted, strict=True))
