"""Linear layers of one row: against torch in float64, with the norm before and the gate or the sum behind."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats.gpu_plain import PlainOnGpu
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.reference.elementwise import GATES
from sluice_server.kernels.triton import gemv
from sluice_server.kernels.triton.norm import rms_norm
from tests.kernels.triton.harness import poisoned

EPS = 1e-5
# Outputs and inputs: whole tiles; a few rows more and inputs that are no whole tile; one row, fewer inputs than a tile.
SHAPES = [(64, 1024), (70, 2100), (1, 96)]


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Random rows of a view into poison."""
    view = poisoned((outputs, inputs + 8), dtype)[:, :inputs]
    return view.copy_(torch.randn(outputs, inputs) * inputs**-0.5)


def normed(x: Tensor, scales: Tensor | None) -> Tensor:
    """RMSNorm in float64."""
    y = x.double() * (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    return y if scales is None else y * scales.double()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_is_multiplied(outputs: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "MANY", 64)
    torch.manual_seed(outputs)
    weight, bias, x = weight_of(outputs, inputs, dtype), torch.randn(outputs).to(dtype), torch.randn(1, inputs)
    h, scales = x.clone(), torch.rand(inputs) + 0.5
    own, limit = x.to(dtype), 2e-3 if dtype is torch.float16 else 1e-5
    layer = PlainOnGpu(weight, bias)
    wanted = own.double() @ weight.double().t() + bias.double()
    assert torch.allclose(layer.apply(own).double(), wanted, atol=1e-5, rtol=limit)
    residual = torch.randn(1, outputs)
    behind = residual.double() + wanted
    assert layer.add_to(residual, own) is residual and torch.allclose(residual.double(), behind, atol=1e-5, rtol=limit)
    for weights in (scales, None):
        wanted = normed(h, weights) @ weight.double().t() + bias.double()
        assert torch.allclose(layer.apply_normed(h, weights, EPS).double(), wanted, atol=1e-5, rtol=limit)
    assert torch.equal(h, x)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_gated(activation: str, has_bias: bool) -> None:
    torch.manual_seed(1)
    weight, bias = weight_of(2 * 70, 1500, torch.float32), torch.randn(2 * 70) if has_bias else None
    x, scales = torch.randn(1, 1500), torch.rand(1500) + 0.5
    layer = PlainOnGpu(weight, bias)
    found = layer.apply_gated(x, scales, EPS, activation)
    assert torch.allclose(found, layer.gated(rms_norm(x, scales, EPS), activation), atol=1e-5, rtol=1e-5)
    halves = normed(x, scales) @ weight.double().t() + (0.0 if bias is None else bias.double())
    assert found.shape == (1, 70)
    assert torch.allclose(found.double(), GATES[activation](halves), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beside", ["norm", "residual"])
def test_a_gate_has_no_long_norm_and_no_sum_in_its_launch(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "FUSED", 63)
    weight, x = weight_of(64, 64, torch.float32), torch.randn(1, 64)
    with pytest.raises(ValueError, match="the gate 'silu'"):
        gemv.linear(x, weight, gate="silu", **{"norm": (None, EPS)} if beside == "norm" else {"residual": x})
    scales = torch.rand(64)
    apart = PlainOnGpu(weight, None).gated(rms_norm(x, scales, EPS))
    assert torch.equal(PlainOnGpu(weight, None).apply_gated(x, scales, EPS), apart)  # in two launches


def test_a_held_row_goes_through_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs share many tiles, the last of which is not whole; the norm, the gate or the sum is in the launch."""
    monkeypatch.setattr(gemv, "tiles_of", lambda *sizes, **kinds: gemv.RowTiles(4, 128, 4, 1))
    torch.manual_seed(2)
    weight, bias, x, scales = weight_of(70, 100, torch.float32), torch.randn(70), torch.randn(1, 100), torch.rand(100)
    layer, wide = PlainOnGpu(weight, bias), weight.double().t()
    assert torch.allclose(layer.apply(x).double(), x.double() @ wide + bias, atol=1e-5)
    residual = torch.randn(1, 70)
    behind = residual.double() + x.double() @ wide + bias
    assert torch.allclose(layer.add_to(residual, x).double(), behind, atol=1e-5)
    halves = normed(x, scales) @ wide + bias
    assert torch.allclose(layer.apply_normed(x, scales, EPS).double(), halves, atol=1e-5)
    assert torch.allclose(layer.apply_gated(x, scales, EPS).double(), GATES["silu"](halves), atol=1e-5)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_are_kept_in_float32_where_they_are_wanted(num: int, has_bias: bool) -> None:
    torch.manual_seed(3)
    weight, x, scales = weight_of(70, 128, torch.float32), torch.randn(num, 128), torch.rand(128)
    layer = PlainOnGpu(weight, torch.randn(70) if has_bias else None)
    out = torch.empty(num, 70)
    assert layer.wide_normed(x, scales, EPS, out) is out
    assert torch.allclose(out, layer.apply_normed(x, scales, EPS), atol=1e-5)
    assert torch.allclose(layer.fixed().wide_normed(x, scales, EPS), out, atol=1e-5)


def test_several_rows_and_batch_invariant_ones_take_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits must not depend on whether it is alone."""
    monkeypatch.setattr(gemv, "linear", None)
    weight, x, scales = weight_of(40, 64, torch.float32), torch.randn(3, 64), torch.rand(64)
    layer, plain = PlainOnGpu(weight, None), PackedLinear(weight, None)
    assert torch.equal(layer.apply(x), plain.apply(x))
    assert torch.allclose(layer.apply_gated(x, scales, EPS), plain.apply_gated(x, scales, EPS), atol=1e-5)
    fixed = layer.fixed()
    assert torch.equal(fixed.apply(x[:1]), fixed.apply(x)[:1])
    residual = torch.zeros(3, 40)
    assert torch.equal(layer.add_to(residual, x), plain.apply(x))
