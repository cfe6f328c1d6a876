"""Layouts of published quantised weights: their values are exactly those that the packers of `tests.oracle` meant."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats import published
from sluice_server.kernels.formats.packed_weights import (
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    Packed,
    WideWeight,
    dequantise,
    stack,
    take_rows,
)
from tests.oracle import published as oracle

Read = Callable[[dict[str, Tensor]], Packed]


def gptq(bits: int, group: int, shift: int, found: dict[str, Tensor]) -> Packed:
    of = (found["qweight"], found["qzeros"], found["scales"], group, bits, shift, found["g_idx"])
    return published.from_gptq(*of)


def words(bits: int, group: int, found: dict[str, Tensor]) -> Packed:
    zeros, order = found.get("weight_zero_point"), found.get("weight_g_idx")
    return published.from_words(found["weight_packed"], found["weight_scale"], zeros, group, bits, order)


def awq(group: int, found: dict[str, Tensor]) -> Packed:
    return published.from_awq(found["qweight"], found["qzeros"], found["scales"], group)


LAYOUTS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], Read, type]] = {
    **{
        f"awq-{group}": (functools.partial(oracle.awq, group=group), functools.partial(awq, group), Int4Weight)
        for group in (32, 128, 192)
    },
    **{
        f"gptq-{bits}-{group}-{shift}-{mixed}": (
            functools.partial(oracle.gptq, group=group, symmetric=False, bits=bits, shift=shift, mixed=mixed),
            functools.partial(gptq, bits, group, shift),
            WideWeight if mixed else {4: Int4Weight, 8: Int8GroupedWeight}[bits],
        )
        for bits, group, shift, mixed in [(4, 64, 1, False), (4, 128, 0, False), (8, 64, 1, False), (8, 32, 1, True)]
    },
    **{
        f"words-{bits}-{group}-{symmetric}-{mixed}": (
            functools.partial(oracle.packed, group=group, symmetric=symmetric, bits=bits, mixed=mixed),
            functools.partial(words, bits, group),
            WideWeight if mixed else {4: Int4Weight, 8: Int8GroupedWeight}[bits],
        )
        for bits, group, symmetric, mixed in [(4, 128, True, False), (4, 32, False, False), (8, 64, False, True)]
    },
    "fp8 blocks": (
        oracle.fp8_blocks,
        lambda found: published.from_blocks(found["weight"], found["weight_scale_inv"], (48, 40)),
        WideWeight,
    ),
    "nvfp4": (
        oracle.nvfp4,
        lambda found: published.from_nvfp4(found["weight"], found["weight_scale"], found["weight_scale_2"]),
        WideWeight,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_that_were_meant(name: str) -> None:
    quantise, read, form = LAYOUTS[name]
    torch.manual_seed(1)
    found, meant = quantise(torch.randn(40, 192))
    packed = read(found)
    assert type(packed) is form and all(part.is_contiguous() for part in packed if isinstance(part, Tensor))
    assert torch.equal(dequantise(packed), meant)
    order = torch.tensor([7, 3, 39, 3])
    assert torch.equal(dequantise(take_rows(packed, order)), meant[order])
    assert torch.equal(dequantise(stack([packed, take_rows(packed, order)])), torch.cat((meant, meant[order])))
    assert type(stack([packed, packed])) is form


def test_floats_of_4_bits_are_levels_of_8() -> None:
    torch.manual_seed(2)
    blocks, scales, meant = oracle.mxfp4(torch.randn(40, 192))
    packed = published.from_mxfp4(blocks, scales)
    assert isinstance(packed, Int8GroupedWeight) and packed.group == 32
    assert torch.equal(dequantise(packed), meant)


def test_weights_of_different_forms_are_stacked_as_values() -> None:
    eight = Int8Weight(torch.randint(-128, 128, (3, 64), dtype=torch.int8), torch.rand(3))
    wide = WideWeight(torch.randn(2, 64))
    found = stack([eight, wide])
    assert isinstance(found, WideWeight)
    assert torch.equal(found.values, torch.cat((dequantise(eight), wide.values)))


@pytest.mark.parametrize("index", [-1, 3, 1 << 20])
def test_an_order_that_names_no_group_is_refused(index: int) -> None:
    found, _ = oracle.gptq(torch.randn(16, 192), group=64)
    found["g_idx"][5] = index
    with pytest.raises(ValueError, match=rf"g_idx names group {abs(index)}, and there are 3|g_idx names group 2"):
        gptq(4, 64, 1, found)
