"""Linear layers over weights that are rounded when they are loaded, as on a GPU: interpreted here."""

import pytest
import torch

from kernels import kinds
from kernels.elementwise import rms_norm, silu_mul
from kernels.gpu_linear import Int4OnGpu, Int8OnGpu, round_groups
from kernels.linear import OnGpu
from kernels.packed_weights import dequantise, quantise_rows


def meant(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """What the rounded weight stands for."""
    if bits == 4:
        return dequantise(round_groups(weight))
    rows = quantise_rows(weight, torch.int8)
    return rows.weight.float() * rows.scales[:, None]


@pytest.mark.parametrize("inputs", [64, 96, 256])
@pytest.mark.parametrize(("kind", "bits", "off"), [(Int8OnGpu, 8, 0.01), (Int4OnGpu, 4, 0.15)])
def test_a_rounded_layer_is_near_its_weight(
    kind: type[Int8OnGpu | Int4OnGpu], bits: int, off: float, inputs: int
) -> None:
    torch.manual_seed(inputs)
    weight, bias, x = torch.randn(32, inputs), torch.randn(32), torch.randn(3, inputs)
    layer = kind(weight, bias)
    rounded = meant(weight, bits)
    assert (rounded - weight).norm() < off * weight.norm()
    assert torch.allclose(layer.apply(x), x @ rounded.t() + bias, atol=1e-4)
    norm = torch.rand(inputs)
    normed = rms_norm(x, norm, 1e-6, torch.float32) @ rounded.t() + bias
    assert torch.allclose(layer.apply_normed(x, norm, 1e-6), normed, atol=1e-4)
    assert torch.allclose(layer.apply_gated(x, norm, 1e-6), silu_mul(normed), atol=1e-4)
    residual = torch.randn(3, 32)
    assert torch.allclose(layer.add_to(residual.clone(), x), residual + x @ rounded.t() + bias, atol=1e-4)
    assert layer.weight.nbytes * (32 // bits) == weight.nbytes or inputs % 64


@pytest.mark.parametrize(("name", "kind"), [("int8", Int8OnGpu), ("int4", Int4OnGpu), ("bfloat16", OnGpu)])
def test_a_gpu_is_given_its_own_kinds(name: str, kind: type[OnGpu]) -> None:
    chosen = next(one for one in kinds.KINDS[name] if one.fits(torch.device("cuda")))
    assert type(chosen.make(torch.randn(32, 64), None, False)) is kind


def test_a_weight_of_zeros_stays_one() -> None:
    layer = Int4OnGpu(torch.zeros(16, 64), None)
    assert torch.equal(layer.apply(torch.randn(2, 64)), torch.zeros(2, 16))
