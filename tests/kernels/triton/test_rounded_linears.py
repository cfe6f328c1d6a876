"""Linear layers over weights that are rounded when loaded, as on a GPU, interpreted here."""

import pytest
import torch

from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu, Int4OnGpu, Int8OnGpu
from sluice_server.kernels.formats.gpu_plain import PlainOnGpu
from sluice_server.kernels.formats.linear import GpuLinear
from sluice_server.kernels.formats.packed_weights import dequantise, quantise_rows
from sluice_server.kernels.formats.zero_points import round_groups
from sluice_server.kernels.reference.elementwise import rms_norm, silu_mul


def meant(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers that the rounded weight represents."""
    if bits == 4:
        return dequantise(round_groups(weight))
    rows = quantise_rows(weight, torch.int8)
    return rows.weight.float() * rows.scales[:, None]


@pytest.mark.parametrize("inputs", [64, 96, 256])
@pytest.mark.parametrize(("kind", "bits", "off"), [("int8", 8, 0.01), ("int4", 4, 0.09)])
def test_a_rounded_layer_is_near_its_weight(kind: str, bits: int, off: float, inputs: int) -> None:
    torch.manual_seed(inputs)
    weight, bias, x = torch.randn(32, inputs), torch.randn(32), torch.randn(3, inputs)
    layer = on_gpu(kind).make(weight, bias, False, None)
    rounded = meant(weight, bits)
    assert (rounded - weight).norm() < off * weight.norm()
    assert torch.allclose(layer.apply(x), x @ rounded.t() + bias, atol=1e-4)
    norm = torch.rand(inputs)
    normed = rms_norm(x, norm, 1e-6, torch.float32) @ rounded.t() + bias
    assert torch.allclose(layer.apply_normed(x, norm, 1e-6), normed, atol=1e-4)
    assert torch.allclose(layer.apply_gated(x, norm, 1e-6), silu_mul(normed), atol=1e-4)
    residual = torch.randn(3, 32)
    assert torch.allclose(layer.add_to(residual.clone(), x), residual + x @ rounded.t() + bias, atol=1e-4)
    assert layer.weight.nbytes * (32 // bits) == weight.nbytes or inputs % 128


def on_gpu(name: str) -> kinds.WeightFormat:
    """What serves a format on a GPU."""
    return next(one for one in kinds.KINDS[name] if one.fits(torch.device("cuda")))


KINDS = [
    ("int8", Int8OnGpu),
    ("int4", Int4OnGpu),
    ("w8a8", EightBitsOnGpu),
    ("fp8", EightBitsOnGpu),
    ("bfloat16", PlainOnGpu),
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_gpu_is_given_its_own_kinds(name: str, kind: type[GpuLinear]) -> None:
    assert type(on_gpu(name).make(torch.randn(32, 64), None, False, None)) is kind


def test_a_weight_of_zeros_stays_one() -> None:
    layer = Int4OnGpu(torch.zeros(16, 64), None, torch.float32)
    assert torch.equal(layer.apply(torch.randn(2, 64)), torch.zeros(2, 16))


def test_importance_reaches_weights_of_4_bits_alone() -> None:
    torch.manual_seed(2)
    weight, importance = torch.randn(16, 64), torch.ones(64)
    importance[5] = 1000.0
    x = torch.zeros(1, 64)
    x[0, 5] = 1.0
    off = [
        (on_gpu("int4").make(weight, None, False, one).apply(x)[0] - weight[:, 5]).norm() for one in (None, importance)
    ]
    assert off[1] < 0.5 * off[0]


@pytest.mark.parametrize(("name", "dtype", "off"), [("w8a8", torch.int8, 0.02), ("fp8", torch.float8_e4m3fn, 0.12)])
def test_activations_are_rounded_row_by_row_where_weights_are(name: str, dtype: torch.dtype, off: float) -> None:
    """A row of large numbers costs the others no precision; the output has the activations' format."""
    torch.manual_seed(1)
    weight, bias = torch.randn(32, 96), torch.randn(32)
    x = torch.randn(4, 96) * torch.tensor([[1.0], [1000.0], [1e-3], [1.0]])
    (kind,) = kinds.KINDS[name]
    layer = kind.make(weight, bias, False, None)
    want = x @ weight.t()
    assert layer.weight.dtype is dtype and layer.kernel == ("Triton W8A8" if name == "w8a8" else "Triton fp8")
    found = layer.apply(x) - bias
    assert ((found - want).norm(dim=1) <= off * want.norm(dim=1) + 1e-5).all()
    half = kind.make(weight.half(), None, False, None)
    assert half.apply(torch.randn(2, 96)).dtype is torch.float16


@pytest.mark.parametrize("name", ["int4", "w8a8", "fp8"])
def test_the_head_is_rounded_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        **kinds.KINDS,
        "int8": (kinds.WeightFormat(lambda _: True, lambda weight, bias, *_: Int8OnGpu(weight, bias)),),
    }
    monkeypatch.setattr(kinds, "KINDS", table)
    assert type(kinds.pack(torch.randn(32, 64), precise=True, weights=name)) is Int8OnGpu


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_nothing_multiplies_them_on_a_cpu(name: str) -> None:
    with pytest.raises(ValueError, match=f"nothing multiplies weights of {name} on cpu"):
        kinds.pack(torch.randn(32, 64), weights=name)
