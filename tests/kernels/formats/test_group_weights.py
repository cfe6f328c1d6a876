"""Weights in groups of 32 as GGUF files have them: values, rows, and stacks of several forms."""

import pytest
import torch

from sluice_server.kernels.formats.packed_weights import AffineWeight, dequantise, stack, take_rows
from sluice_server.kernels.formats.quantised import QuantisedWeight


def weight(bits: int, has_minima: bool, rows: int = 6, inputs: int = 96) -> AffineWeight:
    made = torch.Generator().manual_seed(bits + 10 * has_minima)
    levels = torch.randint(0, 1 << bits, (rows, inputs), generator=made, dtype=torch.uint8)
    scales = torch.rand(rows, inputs // 32, generator=made).half()
    return AffineWeight(levels, scales, -scales * 3 if has_minima else None, bits)


FORMS = [(bits, has_minima) for bits in (4, 8) for has_minima in (False, True)]


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_values_are_those_that_kernels_multiply(bits: int, has_minima: bool) -> None:
    packed = weight(bits, has_minima)
    want = QuantisedWeight(packed.bits, packed.levels, packed.scales, packed.minima).dequantise()
    assert torch.equal(dequantise(packed), want)
    assert torch.equal(dequantise(packed.widest()), want)


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_rows_are_taken_with_their_scales(bits: int, has_minima: bool) -> None:
    packed, order = weight(bits, has_minima), torch.tensor([4, 0, 5])
    assert torch.equal(dequantise(take_rows(packed, order)), dequantise(packed)[order])


@pytest.mark.parametrize("forms", [FORMS, FORMS[:1] * 2, FORMS[1:2] * 3, [FORMS[0], FORMS[2]]])
def test_a_stack_of_any_forms_has_their_values(forms: list[tuple[int, bool]]) -> None:
    each = [weight(*form) for form in forms]
    found = stack(list(each))
    assert isinstance(found, AffineWeight)
    assert torch.equal(dequantise(found), torch.cat([dequantise(one) for one in each]))
    assert len(set(forms)) > 1 or (found.bits, found.minima is not None) == forms[0]
