"""Rounded weights and caches: our kernels against torch's, and both against the represented numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.integer_linear import IntegerLinear, NativeIntegerLinear, integer_linear
from sluice_server.kernels.formats.packed_weights import (
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    WideWeight,
    dequantise,
    pack_nibbles,
)
from sluice_server.kernels.formats.quantised import (
    GROUP,
    LEVELS,
    QuantisedWeight,
    from_packed,
    round_weight,
)
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference import definitions
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
SHAPES = [(2, 5), (96, 48), (130, 1030), (64, 704)]
CACHES = [torch.float32, torch.bfloat16, torch.int8]


@pytest.fixture(params=[*builds.KNOWN, "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test with our kernels of each instruction set of this machine, and without."""
    name: str = request.param
    module = None if name == "torch" else kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    return name


def exact(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """x rounded to 8 bits by groups of its rows, times the weight that `weight` represents, in float64."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True).double() / LEVELS
    seen = torch.where(scale == 0, 0.0, (groups / scale).round() * scale).flatten(1)[:, : x.shape[1]]
    return seen @ weight.dequantise().double().t()


FORMS = [(8, False), (4, True), (8, True), (4, False)]


def random_weight(features: int, inputs: int, bits: int, has_minima: bool) -> QuantisedWeight:
    """Of any levels, and scales that differ by orders of magnitude."""
    groups = -(-inputs // GROUP)
    levels = torch.randint(1 << bits, (features, inputs), dtype=torch.uint8)
    scales = (torch.randn(features, groups) * 0.01 * 10.0 ** torch.randint(-2, 3, (1, groups))).half()
    minima = (torch.randn(features, groups) * (1 << bits - 1)).half() * scales if has_minima else None
    return QuantisedWeight(bits, levels, scales, minima)


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_are_those_of_the_rounded_numbers(
    rows: int, features: int, inputs: int, bits: int, has_minima: bool
) -> None:
    torch.manual_seed(1)
    weight, x = random_weight(features, inputs, bits, has_minima), torch.randn(rows, inputs)
    x[:, inputs // 3] *= 40.0
    want, got = exact(x, weight), integer_linear(weight, None, False).apply(x)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_greatest_sums_do_not_saturate(bits: int, has_minima: bool, sign: float) -> None:
    """All weights and activations are at an end of their range, over more inputs than a 16-bit sum could hold."""
    inputs, highest = 300, (1 << bits) - 1
    groups = -(-inputs // GROUP)
    levels = torch.full((64, inputs), highest, dtype=torch.uint8)
    minima = torch.full((64, groups), -3.0).half() if has_minima else None
    weight = QuantisedWeight(bits, levels, torch.ones(64, groups).half(), minima)
    value = highest - 3 if has_minima else highest - (1 << bits - 1)
    got = integer_linear(weight, None, False).apply(torch.full((9, inputs), sign * LEVELS))
    assert torch.equal(got, torch.full((9, 64), sign * LEVELS * inputs * value))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [5, 32, 70, 576])
def test_rounded_weights_are_near(bits: int, inputs: int) -> None:
    """Half a step off at most in 8 bits; in 4 bits ends may be clipped. A great weight spoils only its own group."""
    torch.manual_seed(7)
    weight = torch.randn(40, inputs)
    weight[3] = 0.25
    weight[4] = 0.0
    weight[5, 0] = 1000.0
    rounded = round_weight(weight, bits)
    assert rounded.levels.shape == weight.shape and rounded.scales.shape == (40, -(-inputs // GROUP))
    assert rounded.scales.dtype is torch.float16 and int(rounded.levels.max()) < 1 << bits
    off = (rounded.dequantise() - weight).abs()
    assert torch.allclose(rounded.dequantise()[3:5], weight[3:5], rtol=2e-3)
    assert (off[5, GROUP:] <= 0.3).all()
    if bits == 8:
        step = rounded.scales.float().repeat_interleave(GROUP, 1)[:, :inputs]
        assert rounded.minima is None and (off <= 0.51 * step).all()
    else:
        assert rounded.minima is not None and off[6:].square().mean() <= 0.09**2


@pytest.mark.parametrize("zeros", [8.0, 5.0])
@pytest.mark.parametrize(("group", "inputs"), [(32, 96), (64, 192), (128, 256), (70, 70), (96, 96)])
def test_weights_of_4_bits_that_were_published_are_taken_as_they_are(group: int, inputs: int, zeros: float) -> None:
    torch.manual_seed(8)
    scales = torch.randn(-(-inputs // group), 20).half() * 0.01
    nibbles = pack_nibbles(torch.randint(16, (20, inputs)))
    packed = Int4Weight(nibbles, scales, torch.full_like(scales, zeros), inputs, group)
    weight = from_packed(packed)
    assert weight is not None and (weight.minima is None) == (zeros == 8.0)
    assert torch.allclose(weight.dequantise(), dequantise(packed), rtol=0.0, atol=0.005 * float(scales.abs().max()))


def test_groups_that_no_kernel_takes_are_refused() -> None:
    levels, scales = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="groups of 48 inputs are not supported: multiples of 32, or one for all"):
        QuantisedWeight.from_groups(4, levels, scales, None, 48)
    with pytest.raises(ValueError, match=r"a scale of 70000.0 is above 65504.0"):
        QuantisedWeight.from_groups(4, levels, scales * 70000.0, None, 64)
    ones = torch.ones(2, 4)
    assert from_packed(Int4Weight(pack_nibbles(levels), ones, ones, 96, 48)) is None
    assert from_packed(Int4Weight(pack_nibbles(levels), ones * 70000.0, ones, 96, 64)) is None
    assert from_packed(WideWeight(torch.ones(4, 96))) is None


def test_weights_of_8_bits_that_were_published_are_taken_as_they_are() -> None:
    torch.manual_seed(9)
    levels = torch.randint(256, (20, 160), dtype=torch.uint8)
    grouped = Int8GroupedWeight(levels, torch.randn(3, 20).half().float(), torch.full((3, 20), 128.0), 64)
    by_row = Int8Weight(torch.randint(-128, 128, (20, 160), dtype=torch.int8), torch.rand(20).half().float())
    for packed in (grouped, by_row):
        weight = from_packed(packed)
        assert weight is not None and torch.equal(weight.dequantise(), dequantise(packed))
    weight = from_packed(grouped._replace(zeros=torch.full((3, 20), 100.0)))
    assert weight is not None and weight.minima is not None
    assert torch.allclose(weight.dequantise(), dequantise(grouped._replace(zeros=torch.full((3, 20), 100.0))), atol=0.2)


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_what_is_fused_around_them_equals_its_parts(bits: int, has_minima: bool) -> None:
    """The norm, its weights, the gates, the bias and the sum with what is there."""
    torch.manual_seed(2)
    x, bias, norm = torch.randn(9, 260) * 3, torch.randn(150), torch.rand(260) + 0.5
    weight = random_weight(150, 260, bits, has_minima)
    plain = IntegerLinear(weight, bias)
    packed, gated = (integer_linear(weight, bias, is_gated) for is_gated in (False, True))
    for weights in (None, norm):
        normed = plain.apply(definitions.rms_norm(x, weights, 1e-5))
        assert near(ops.linear_normed(x, weights, 1e-5, packed), normed, 0.002)
        assert near(ops.linear_gated(x, weights, 1e-5, gated), definitions.silu_mul(normed), 0.005)
        gelu = ops.linear_gated(x, weights, 1e-5, gated, "gelu_tanh")
        assert near(gelu, definitions.gelu_tanh_mul(normed), 0.005)
    residual = torch.randn(9, 150)
    assert near(ops.linear_add_(residual.clone(), x, packed), residual + plain.apply(x), 1e-5)


def near(got: Tensor, want: Tensor, share: float) -> bool:
    """Whether the difference is at most that share of what is wanted: a few activations may be rounded otherwise."""
    return float((got - want).norm() / want.norm()) < share


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_nothing_is_read_or_written_beside_a_product(kernels: str, bits: int, has_minima: bool) -> None:
    """What lies behind a row of activations is no number, nor is what an earlier product left; results have walls."""
    if kernels == "torch":
        pytest.skip("torch's operators allocate their results")
    torch.manual_seed(9)
    weight, wide = random_weight(50, 70, bits, has_minima), random_weight(50, 700, bits, has_minima)
    packed, before = NativeIntegerLinear(weight, None, False), NativeIntegerLinear(wide, None, False)
    for rows in (1, 7, 40):
        assert before.apply(torch.full((rows, 700), float("nan"))).isnan().all()
        beside = torch.full((rows, 100), float("nan"))
        beside[:, :70] = torch.randn(rows, 70)
        walls = torch.full((rows + 2, 50), 7.0)
        packed.multiply(beside[:, :70], walls[1:-1], None, native.NO_NORM, native.STORE)
        assert near(walls[1:-1], IntegerLinear(weight, None).apply(beside[:, :70]), 1e-5)
        assert (walls[[0, -1]] == 7.0).all()


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_a_packed_weight_takes_its_bits_and_those_of_its_scales(kernels: str, bits: int, has_minima: bool) -> None:
    if kernels == "torch":
        pytest.skip("torch's operators keep levels as they are")
    packed = NativeIntegerLinear(random_weight(128, 320, bits, has_minima), None, False)
    assert packed.weight.numel() * 8 == 128 * 320 * (bits + (1.0 if has_minima else 0.5))


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_costs_what_it_should(bits: int) -> None:
    """For normal weights and activations the error of a product is a small part of it, also where one input of a few
    groups is far greater than the others."""
    torch.manual_seed(3)
    weight, x = torch.randn(200, 512), torch.randn(64, 512)
    got = ops.linear(x, weight_formats.pack(weight, weights=f"int{bits}"))
    want = x @ weight.t()
    assert float((got - want).norm() / want.norm()) < {8: 0.01, 4: 0.085}[bits]
    weight[:, [7, 300]] *= 100.0
    x[:, [7, 300]] = 0.0
    want = x @ weight.t()
    got = ops.linear(x, weight_formats.pack(weight, weights=f"int{bits}"))
    assert float((got - want).norm() / want.norm()) < {8: 0.12, 4: 0.6}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_broken_row_is_nan_and_alone(bits: int) -> None:
    torch.manual_seed(4)
    x, packed = torch.randn(12, 64), weight_formats.pack(torch.randn(32, 64), weights=f"int{bits}")
    want = ops.linear(x, packed)
    x[3, 5], x[8, 60] = float("nan"), float("inf")
    x[9] = 0.0
    got = ops.linear(x, packed)
    broken = [3, 8]
    assert got[broken].isnan().all()
    assert torch.equal(got[9], torch.zeros(32))
    others = [i for i in range(12) if i not in (3, 8, 9)]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize(("features", "inputs"), [(98, 300), (64, 64)])
def test_row_bits_do_not_depend_on_company(bits: int, has_minima: bool, features: int, inputs: int) -> None:
    torch.manual_seed(5)
    x, norm = torch.randn(512, inputs), torch.rand(inputs)
    weight = random_weight(features, inputs, bits, has_minima)
    packed, gated = (integer_linear(weight, None, is_gated) for is_gated in (False, True))
    whole, whole_gated = ops.linear_normed(x, norm, 1e-5, packed), ops.linear_gated(x, norm, 1e-5, gated)
    for rows in range(1, 41):
        first = 3 * rows
        seen = slice(first, first + rows)
        assert torch.equal(ops.linear_normed(x[seen], norm, 1e-5, packed), whole[seen]), rows
        assert torch.equal(ops.linear_gated(x[seen], norm, 1e-5, gated), whole_gated[seen]), rows


def test_row_bits_of_bfloat16_do_not_depend_on_company() -> None:
    torch.manual_seed(5)
    x, weight, norm = torch.randn(33, 300), torch.randn(98, 300).bfloat16(), torch.rand(300)
    packed, gated = (weight_formats.pack(weight, gated=is_gated, weights="bfloat16") for is_gated in (False, True))
    whole, whole_gated = ops.linear_normed(x, norm, 1e-5, packed), ops.linear_gated(x, norm, 1e-5, gated)
    for rows in (1, 4, 5, 8, 13):
        assert torch.equal(ops.linear_normed(x[:rows], norm, 1e-5, packed), whole[:rows]), rows
        assert torch.equal(ops.linear_gated(x[:rows], norm, 1e-5, gated), whole_gated[:rows]), rows


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_every_instruction_set_gives_the_same_bits(
    kernels: str, bits: int, has_minima: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for norms, whose sums have as many parts as a vector."""
    modules = [module for name in builds.KNOWN if name in builds.runnable() and (module := builds.load(name))]
    if kernels == "torch" or not modules:
        pytest.skip("torch's operators multiply and add in two roundings")
    torch.manual_seed(10)
    x, weight = torch.randn(20, 300), random_weight(98, 300, bits, has_minima)
    found = []
    for module in (builds.MODULE, modules[0]):
        monkeypatch.setattr(builds, "MODULE", module)
        found.append(NativeIntegerLinear(weight, None, False).apply(x))
    assert torch.equal(*found)


def test_in_four_bits_what_reaches_the_logits_undiluted_has_eight() -> None:
    weight, x = torch.randn(40, 256), torch.randn(6, 256)
    eight, precise = (weight_formats.pack(weight, weights=w, precise=True) for w in ("int8", "int4"))
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
    steps = kept.abs().amax(-1, keepdim=True) / LEVELS if dtype is torch.int8 else kept.abs() / 128
    assert ((slots.decode(written, 64, torch.float32) - kept).abs() <= 0.51 * steps + 1e-5).all()
    got = ops.paged_attention(heads[:, :4], cache, meta, 0.125, window)
    rounds = dtype is torch.bfloat16 and builds.multiplies("avx512_bf16")  # queries and softmax's weights, too
    as_bytes = dtype is torch.int8  # with VNNI queries and weights have 16 bits
    error = 0.01 if rounds else 1e-4 if as_bytes else 2e-5
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
