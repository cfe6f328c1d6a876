"""Some inputs of a weight in each form: the same values, and groups of inputs with one scale stay whole."""

import pytest
import torch

from sluice_server.kernels.formats.packed_weights import (
    AffineWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    Packed,
    WideWeight,
    dequantise,
    num_inputs,
    pack_nibbles,
    take_columns,
)

ROWS, INPUTS = 5, 208


def weights(group: int) -> dict[str, Packed]:
    """A weight in each form; the last group of inputs may be smaller."""
    made = torch.Generator().manual_seed(group)
    levels = torch.randint(16, (ROWS, INPUTS), generator=made, dtype=torch.uint8)
    groups = -(-INPUTS // group)
    scales, zeros = (torch.rand(groups, ROWS, generator=made) for _ in range(2))
    found: dict[str, Packed] = {
        "wide": WideWeight(torch.randn(ROWS, INPUTS, generator=made)),
        "int8": Int8Weight(levels.to(torch.int8), torch.rand(ROWS, generator=made)),
        "grouped": Int8GroupedWeight(levels, scales, zeros, group),
        "int4": Int4Weight(pack_nibbles(levels), scales, zeros, INPUTS, group),
    }
    if INPUTS % group == 0:
        found["affine"] = AffineWeight(levels, scales.t().half().contiguous(), zeros.t().half().contiguous(), 8)
    return found


@pytest.mark.parametrize(("first", "last"), [(0, 208), (0, 64), (64, 128), (128, 208), (192, 208)])
@pytest.mark.parametrize("group", [16, 32, 64, 208])
def test_columns_have_the_values_of_the_whole(group: int, first: int, last: int) -> None:
    for name, packed in weights(group).items():
        part = take_columns(packed, first, last)
        assert type(part) is type(packed) and num_inputs(part) == last - first
        assert torch.equal(dequantise(part), dequantise(packed)[:, first:last]), name


def test_a_part_of_one_group_keeps_its_scale() -> None:
    for name, packed in weights(64).items():
        assert torch.equal(dequantise(take_columns(packed, 80, 96)), dequantise(packed)[:, 80:96]), name


@pytest.mark.parametrize(("first", "last"), [(16, 144), (0, 80)])
@pytest.mark.parametrize("form", ["grouped", "int4", "affine"])
def test_a_cut_within_a_group_is_refused(form: str, first: int, last: int) -> None:
    packed = weights(52 if form == "affine" else 64)[form]
    with pytest.raises(ValueError, match=f"inputs {first} to {last - 1} cut a group of"):
        take_columns(packed, first, last)
