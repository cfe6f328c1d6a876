"""Rounded weights and caches: our kernels against torch's, and both against the represented numbers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import quantised
from sluice_server.kernels.formats.quantised import IntegerLinear, NativeIntegerLinear, QuantisedWeight, round_weight
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference import definitions

CPU = torch.device("cpu")
SHAPES = [(2, 5), (96, 48), (130, 1030), (64, 704)]
CACHES = [torch.float32, torch.bfloat16, torch.int8]


@pytest.fixture(params=[*builds.KNOWN, "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test with our kernels of each instruction set of this machine, and without."""
    name: str = request.param
    module = builds.load(name) if name in builds.runnable() else None
    if module is None and name != "torch":
        pytest.skip(f"no {name}: not an instruction set of this machine, or installed without a C++ compiler")
    monkeypatch.setattr(builds, "MODULE", module)
    return name


def exact(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """x rounded row by row to 8 bits, times the weight that `weight` represents, in float64."""
    rest = x.index_fill(1, weight.outliers, 0.0)
    scale = rest.abs().amax(1, keepdim=True).double() / quantised.LEVELS
    seen = (rest / scale).round() * scale
    seen[:, weight.outliers] = x[:, weight.outliers].double()
    return seen @ weight.dequantise().double().t()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_are_those_of_the_rounded_numbers(rows: int, features: int, inputs: int, bits: int) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(features, inputs), torch.randn(rows, inputs)
    weight[:, inputs // 3] *= 40.0
    rounded = round_weight(weight, bits)
    assert rounded.outliers.tolist() == ([inputs // 3] if inputs > 36 else [])
    want = exact(x, rounded)
    got = ops.linear(x, ops.pack_linear(weight, weights=f"int{bits}"))
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_greatest_sums_do_not_saturate(bits: int, sign: float) -> None:
    """All weights and activations are at an end of their range, over more inputs than a 16-bit sum could hold."""
    inputs = 300
    levels = torch.full((64, inputs), (1 << bits) - 1, dtype=torch.uint8)
    weight = QuantisedWeight(bits, levels, torch.ones(64, -(-inputs // 128) if bits == 4 else 1), *no_outliers(64))
    x = torch.full((9, inputs), sign * quantised.LEVELS)
    packed = NativeIntegerLinear(weight, None, False) if builds.is_available() else IntegerLinear(weight, None)
    want = sign * quantised.LEVELS * inputs * ((1 << bits - 1) - 1)
    assert torch.equal(packed.apply(x), torch.full((9, 64), want))


def no_outliers(rows: int) -> tuple[Tensor, Tensor]:
    """The outliers of a weight without any."""
    return torch.empty(0, dtype=torch.int64), torch.empty(rows, 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_fused_around_them_equals_its_parts(bits: int) -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(9, 260) * 3, torch.randn(96, 260) * 0.2, torch.randn(96)
    plain = IntegerLinear(round_weight(weight, bits), bias)
    packed, gated = (ops.pack_linear(weight, bias, gated=is_gated, weights=f"int{bits}") for is_gated in (False, True))
    normed = plain.apply(definitions.rms_norm(x, None, 1e-5))
    assert torch.allclose(ops.linear_normed(x, None, 1e-5, packed), normed, atol=2e-2)
    assert torch.allclose(ops.linear_gated(x, None, 1e-5, gated), definitions.silu_mul(normed), atol=5e-2)
    gelu = ops.linear_gated(x, None, 1e-5, gated, "gelu_tanh")
    assert torch.allclose(gelu, definitions.gelu_tanh_mul(normed), atol=5e-2)
    residual = torch.randn(9, 96)
    assert torch.allclose(ops.linear_add_(residual.clone(), x, packed), residual + plain.apply(x), atol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_costs_what_it_should(bits: int) -> None:
    """For normal weights and activations the error of a product is a small part of it, with an outlier column too."""
    torch.manual_seed(3)
    weight, x = torch.randn(200, 512), torch.randn(64, 512)
    weight[:, 7] *= 100.0
    want = x @ weight.t()
    got = ops.linear(x, ops.pack_linear(weight, weights=f"int{bits}"))
    rest = x.index_fill(1, torch.tensor([7]), 0.0) @ weight.t()
    assert float((got - want).norm() / rest.norm()) < {8: 0.015, 4: 0.13}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_broken_row_is_nan_and_alone(bits: int) -> None:
    torch.manual_seed(4)
    x, packed = torch.randn(12, 64), ops.pack_linear(torch.randn(32, 64), weights=f"int{bits}")
    want = ops.linear(x, packed)
    x[3, 5], x[8, 60] = float("nan"), float("inf")
    x[9] = 0.0
    got = ops.linear(x, packed)
    broken = [3, 8]
    assert got[broken].isnan().all()
    assert torch.equal(got[9], torch.zeros(32))
    others = [i for i in range(12) if i not in (3, 8, 9)]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("weights", ["int8", "int4", "bfloat16"])
def test_row_bits_do_not_depend_on_company(weights: str) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(33, 300), torch.randn(98, 300)
    weight[:, [7, 90, 91]] *= 40.0  # beside the levels, in float32
    norm = torch.rand(300) if weights == "bfloat16" else None
    packed, gated = (
        ops.pack_linear(weight.bfloat16() if norm is not None else weight, gated=g, weights=weights)
        for g in (False, True)
    )
    whole, whole_gated = ops.linear_normed(x, norm, 1e-5, packed), ops.linear_gated(x, norm, 1e-5, gated)
    for rows in (1, 4, 5, 8, 13):
        assert torch.equal(ops.linear_normed(x[:rows], norm, 1e-5, packed), whole[:rows]), rows
        assert torch.equal(ops.linear_gated(x[:rows], norm, 1e-5, gated), whole_gated[:rows]), rows


def test_in_four_bits_what_reaches_the_logits_undiluted_has_eight() -> None:
    weight, x = torch.randn(40, 256), torch.randn(6, 256)
    eight, precise = (ops.pack_linear(weight, weights=w, precise=True) for w in ("int8", "int4"))
    assert torch.equal(ops.linear(x, eight), ops.linear(x, precise))


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [None, 6])
def test_attention_over_a_rounded_cache_equals_its_reference(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(6)
    lens, contexts = [1, 1, 13], [9, 70, 50]
    tables = np.array([[3, 0, 0, 0, 0], [1, 4, 6, 8, 2], [5, 7, 9, 10, 0]], dtype=np.int32)
    meta = AttentionMetadata.build(lens, contexts, tables, 16, CPU)
    cache = slots.encode(torch.randn(11, 16, 2, 2, 64), dtype)
    heads = torch.randn(meta.num_tokens, 8, 64)
    cis = torch.polar(torch.ones(len(heads), 1, 32), torch.randn(len(heads), 1, 32))
    want = heads.clone()
    definitions.rope_(want[:, :6], cis)
    ops.rotate_and_write(heads, cis, cache, meta)
    written = cache.view(-1, *cache.shape[2:])[meta.write_slots]
    kept = want[:, 4:].reshape(-1, 2, 2, 64)
    steps = kept.abs().amax(-1, keepdim=True) / quantised.LEVELS if dtype is torch.int8 else kept.abs() / 128
    assert ((slots.decode(written, 64, torch.float32) - kept).abs() <= 0.51 * steps + 1e-5).all()
    got = ops.paged_attention(heads[:, :4], cache, meta, 0.125, window)
    rounds = dtype is torch.bfloat16 and builds.multiplies("amx_bf16")  # queries and softmax's weights, too
    error = 0.01 if rounds else 2e-5
    assert torch.allclose(got, definitions.paged_attention(heads[:, :4], cache, meta, 0.125, window), atol=error)


def test_a_broken_key_is_nan_in_eight_bits() -> None:
    meta = AttentionMetadata.build([1, 1], [1, 1], np.array([[1], [2]], dtype=np.int32), 4, CPU)
    cache = slots.encode(torch.zeros(3, 4, 2, 1, 32), torch.int8)
    heads = torch.randn(2, 3, 32)
    heads[0, 1, 3] = float("inf")
    ops.rotate_and_write(heads, torch.ones(2, 1, 16, dtype=torch.complex64), cache, meta)
    got = ops.paged_attention(heads[:, :1], cache, meta, 1.0, None)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
