"""Weights of 4 bits with zero points: as near as those with minima, wherever a group lies."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import dequantise, unpack_nibbles
from sluice_server.kernels.formats.quantised import round_weight
from sluice_server.kernels.formats.zero_points import round_groups


def weights(kind: str, inputs: int) -> Tensor:
    torch.manual_seed(inputs)
    weight = torch.randn(70, inputs)
    match kind:
        case "heavy":
            return weight**3
        case "positive":
            return weight.abs() + 2.0
        case "negative":
            return -weight.abs() - 2.0
        case "equal":
            return weight[:, :1].expand(-1, inputs).contiguous()
        case _:
            return weight


def cost(found: Tensor, weight: Tensor) -> float:
    return float((found - weight).double().square().sum())


@pytest.mark.parametrize("inputs", [32, 96, 100, 20])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_zero_points_cost_little_more_than_minima(kind: str, inputs: int) -> None:
    weight = weights(kind, inputs)
    packed = round_groups(weight)
    assert packed.zeros.shape == (-(-inputs // 32), 70)
    assert cost(dequantise(packed), weight) < 1.06 * cost(round_weight(weight, 4).dequantise(), weight)


@pytest.mark.parametrize("kind", ["positive", "negative", "equal"])
def test_groups_without_zero_are_rounded_from_zero(kind: str) -> None:
    weight = weights(kind, 64)
    off = (dequantise(round_groups(weight)) - weight).abs()
    assert (off <= weight.abs().amax(1, keepdim=True) / 28).all()  # half a step of 15, and of an eighth of one


def test_zero_points_are_eighths_and_levels_have_4_bits() -> None:
    packed = round_groups(weights("normal", 96))
    assert torch.equal(packed.zeros * 8, (packed.zeros * 8).round()) and packed.zeros.unique().numel() > 16
    assert packed.zeros.min() >= 0 and packed.zeros.max() <= 15
    assert unpack_nibbles(packed).max() == 15


def test_an_input_that_is_large_is_rounded_less() -> None:
    weight, importance = weights("normal", 96), torch.ones(96)
    importance[40] = 1000.0
    plain, weighed = ((dequantise(round_groups(weight, one)) - weight).square() for one in (None, importance))
    assert weighed[:, 40].sum() < 0.05 * plain[:, 40].sum()
    assert torch.equal(weighed[:, :32], plain[:, :32])


def test_no_weight_is_no_number() -> None:
    assert torch.equal(dequantise(round_groups(torch.zeros(4, 64))), torch.zeros(4, 64))
