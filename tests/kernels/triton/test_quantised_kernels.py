"""Products with quantised weights: against the represented numbers in float64, for all edges of tiles.

Inputs are float16 and float32; shapes are small, as the interpreter takes milliseconds for a tile.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats import packed_weights as plain
from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight
from sluice_server.kernels.formats.planes import planes_of_4, planes_of_8, rows_of_8
from sluice_server.kernels.triton import gemm, linear4, linear8, linear8a16, linear16
from sluice_server.kernels.triton.gemm import (
    DECODE,
    LARGE,
    MEDIUM,
    SMALL,
    WIDENED4,
    WIDENED4_BY_32,
    WIDENED4_IN_LITTLE,
    WIDENED8,
    WIDENED8_IN_LITTLE,
    GemmSchedules,
    GemmTiles,
)
from sluice_server.kernels.triton.gpu_traits import GpuTraits
from sluice_server.kernels.triton.unpacked import unpacked
from tests.kernels.triton.harness import assert_close, caught, in_one_order, poisoned

DTYPES = [torch.float32, torch.float16]
# Inputs of one tile and of several, M of each tile, N and K at, below and beyond the edges of tiles.
SHAPES = [(1, 16, 64), (7, 70, 200), (16, 64, 128), (17, 33, 65), (40, 130, 96), (66, 20, 80)]


def inputs(num: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows of a view into poison."""
    torch.manual_seed(num + width)
    view = poisoned((num, width + 16), dtype)[:, :width]
    return view.copy_(torch.randn(num, width))


def weights8(outputs: int, width: int, kind: torch.dtype) -> Int8Weight:
    """Random 8-bit weights, among them the largest numbers, a row of zeros and a nearly denormal scale."""
    packed = plain.quantise_rows(torch.randn(outputs, width + 16), kind)
    packed.weight[0] = 0
    packed.scales[1] = 1e-38
    return Int8Weight(packed.weight[:, :width], packed.scales)


def weights4(outputs: int, width: int, group: int) -> tuple[Int4Weight, Tensor]:
    """Random 4-bit weights, and the numbers they represent, float64 [N, K]."""
    num = -(-width // group)
    values, zeros = torch.randint(0, 16, (outputs, width)), torch.randint(0, 129, (num, outputs)) / 8
    scales = torch.rand(num, outputs).half()
    scales[:, 0] = 0.0
    of = torch.arange(width) // group
    exact = (values - zeros[of].t()).double() * scales[of].t().double()
    return Int4Weight(plain.pack_nibbles(values), scales, zeros.half(), width, group), exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_w8a16(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num, outputs, width = shape
    x, packed = inputs(num, width, dtype), weights8(outputs, width, torch.int8)
    bias = torch.randn(outputs).to(dtype) if num % 2 else None
    wanted = x.double() @ packed.weight.double().t() * packed.scales.double()
    wanted += 0.0 if bias is None else bias.double()
    made = caught(monkeypatch, linear8a16)
    linear8a16.linear_w8a16(x, planes_of_8(packed), bias)
    assert_close(made[0].check(), wanted, dtype)
    assert_close(plain.linear_w8a16(x, packed, bias), wanted, dtype)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
def test_w8a8(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    num, outputs, width = shape
    x, packed = inputs(num, width, torch.float16), weights8(outputs, width, kind)
    rows = linear8.quantise_rows(x, kind)
    wanted = rows.weight.double() @ packed.weight.double().t() * packed.scales.double() * rows.scales.double()[:, None]
    found = linear8.linear_w8a8(x, packed)
    assert_close(found, wanted, torch.float16)
    # Each of a row's numbers is off by half a step at most: the sum is near that of what was not rounded.
    exact = x.double() @ packed.weight.double().t() * packed.scales.double()
    assert (found.double() - exact).norm() < (0.02 if kind is torch.int8 else 0.08) * exact.norm()


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_rows_are_quantised_as_the_reference_does(kind: torch.dtype) -> None:
    x = inputs(9, 111, torch.float32)
    x[0], x[1, 3], x[2] = 0.0, 1e30, x[2] * 1e-20
    found, wanted = linear8.quantise_rows(x, kind), plain.quantise_rows(x, kind)
    assert torch.allclose(found.scales, wanted.scales, rtol=1e-6)
    if kind is torch.int8:
        assert torch.equal(found.weight, wanted.weight)
    else:  # the interpreter rounds to even, to nothing what is small, and to half what a carry doubles
        error = (found.weight.float() - wanted.weight.float()).abs()
        assert (error <= wanted.weight.float().abs() / 2 + 2**-5).all()
        assert (error > wanted.weight.float().abs() / 8 + 2**-5).float().mean() < 0.05
    assert len(linear8.quantise_rows(x[:0], kind).weight) == 0
    with pytest.raises(ValueError, match="up to 32768 wanted"):
        linear8.quantise_rows(torch.zeros(1, 40_000), kind)


@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("shape", [(1, 16, 128), (7, 70, 256), (17, 33, 384), (40, 130, 128)])
def test_w4a16(shape: tuple[int, int, int], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num, outputs, width = shape
    packed, exact = weights4(outputs, width - 40 * (group == 0), group or width - 40)
    x = inputs(num, packed.inputs, torch.float16)
    bias = torch.randn(outputs).half() if num % 2 else None
    wanted = x.double() @ exact.t() + (0.0 if bias is None else bias.double())
    made = caught(monkeypatch, linear4)
    linear4.linear_w4a16(x, planes_of_4(packed), bias)
    assert_close(made[0].check(), wanted, torch.float16)
    assert_close(plain.linear_w4a16(x, packed, bias), wanted, torch.float16)
    assert torch.equal(plain.dequantise(packed).double(), exact.float().double())


def test_4_bit_weights_in_float32() -> None:
    packed, exact = weights4(30, 160, 32)
    x = inputs(5, 160, torch.float32)
    assert_close(linear4.linear_w4a16(x, planes_of_4(packed)), x.double() @ exact.t(), torch.float32)
    with pytest.raises(ValueError, match="contiguous rows of 160"):
        linear4.linear_w4a16(x[:, :80], planes_of_4(packed))


@pytest.mark.parametrize("splits", [2, 4])
def test_parts_of_a_split_are_added_in_their_order(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "splits_of", lambda *shape: splits)
    x, eight = inputs(5, 700, torch.float16), weights8(40, 700, torch.int8)
    bias = torch.randn(40)
    wanted = x.double() @ eight.weight.double().t() * eight.scales.double() + bias
    found = linear8a16.linear_w8a16(x, planes_of_8(eight), bias)
    assert_close(found, wanted, torch.float16)
    assert torch.equal(found, linear8a16.linear_w8a16(x, planes_of_8(eight), bias))
    rows = linear8.quantise_rows(x, torch.int8)
    sums = (rows.weight.long() @ eight.weight.long().t()).float()  # exact, whatever the split
    assert torch.equal(linear8.linear_w8a8(x, eight), (sums * eight.scales * rows.scales[:, None]).half())
    four, exact = weights4(40, 768, 128)
    x = inputs(5, 768, torch.float16)
    assert_close(linear4.linear_w4a16(x, planes_of_4(four), bias), x.double() @ exact.t() + bias, torch.float16)


@pytest.mark.parametrize("width", [100, 2112])
def test_many_rows_are_multiplied_by_a_weight_that_is_written_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eight, (four, exact) = weights8(3, width, torch.int8), weights4(3, width, 64 if width % 64 == 0 else width)
    represented = eight.weight.float() * eight.scales[:, None]
    assert torch.allclose(unpacked(planes_of_8(eight), torch.float32), represented, rtol=1e-6, atol=0)
    assert torch.allclose(unpacked(planes_of_4(four), torch.float32), exact.float(), rtol=1e-6, atol=1e-7)
    x, bias = inputs(5, width, torch.float16), torch.randn(3).half()
    of: dict[ModuleType, tuple[Callable[..., Tensor], Tensor]] = {
        linear8a16: (partial(linear8a16.linear_w8a16, x, planes_of_8(eight), bias), represented),
        linear4: (partial(linear4.linear_w4a16, x, planes_of_4(four), bias), exact),
    }
    for module, (apply, weight) in of.items():
        wanted = x.double() @ weight.double().t() + bias.double()
        with monkeypatch.context() as patch:
            patch.setattr(module, "MANY", 5)
            fixed = apply(is_fixed=True)
            patch.setattr(module, "schedule_of", None)  # what the kernel would need
            assert_close(apply(), wanted, torch.float16)
        assert_close(fixed, wanted, torch.float16)


@pytest.mark.parametrize("width", [32, 64, 65, 100, 512])
@pytest.mark.parametrize("group", [0, 32, 64])
def test_weights_in_planes_are_the_same_weights(width: int, group: int) -> None:
    eight, (four, _) = weights8(3, width, torch.int8), weights4(3, width, group or width)
    assert torch.equal(rows_of_8(planes_of_8(eight)).weight, eight.weight)
    planes = planes_of_4(four)
    assert planes.plane == (64 if width == 512 and group != 32 else 32)
    shifts = torch.arange(0, 16, 4)[:, None]
    found = (planes.words.view(3, -1, 1, planes.plane).int() >> shifts & 15).flatten(1)
    assert torch.equal(found[:, :width], plain.unpack_nibbles(four).int())
    scales = (planes.pairs & ~255).view(torch.float32)
    assert torch.equal(scales, four.scales.float()) and torch.equal((planes.pairs & 255) / 8, four.zeros.float())


def test_groups_that_end_within_a_plane_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 48 inputs: a multiple of 32"):
        planes_of_4(weights4(3, 96, 48)[0])


def test_no_input_gives_no_output() -> None:
    x = torch.zeros(0, 128, dtype=torch.float16)
    assert linear8a16.linear_w8a16(x, planes_of_8(weights8(5, 128, torch.int8))).shape == (0, 5)
    assert linear8.linear_w8a8(x, weights8(5, 128, torch.int8)).shape == (0, 5)
    assert linear4.linear_w4a16(x, planes_of_4(weights4(5, 128, 32)[0])).shape == (0, 5)


def test_tiles_and_splits_follow_the_shape() -> None:
    assert [gemm.tiles_of(num) for num in (1, 16, 17, 64, 65, 4096)] == [DECODE, DECODE, SMALL, MEDIUM, LARGE, LARGE]
    assert gemm.splits_of(DECODE, 1, 4096, 4096) == 4  # 64 tiles, where 264 programs fit
    assert gemm.splits_of(DECODE, 1, 4096, 512) == 1  # nothing to split
    assert gemm.splits_of(DECODE, 1, 64, 1 << 20) == gemm.MAX_SPLITS
    assert gemm.splits_of(LARGE, 4096, 4096, 4096) == 1
    for widened, many in ((WIDENED8, 8), (WIDENED4, 4), (WIDENED4_BY_32, 8)):  # 32 tiles of 264 programs; 16 of 132, 64
        parts = [gemm.schedule_of(num, 4096, 4096, widened, is_fixed=False)[1] for num in (1, 64)]
        assert parts == [8, many]
        assert gemm.schedule_of(1, 4096, 8192, widened, is_fixed=True) == gemm.schedule_of(
            64, 4096, 8192, widened, is_fixed=False
        )
    few = WIDENED4_BY_32.tiles[0]  # as many parts as 396 programs have, and no fewer than 512 inputs each
    assert [gemm.splits_of(few, 1, *shape) for shape in ((14_336, 14_336), (6144, 4096), (51_200, 4096))] == [3, 8, 1]


@pytest.mark.parametrize("capability", [89, 90])
def test_gpus_with_little_memory_get_smaller_tiles(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[GemmSchedules]()

    def schedule_of(
        num: int, outputs: int, inputs: int, schedules: GemmSchedules, *, is_fixed: bool
    ) -> tuple[GemmTiles, int]:
        asked.append(schedules)
        return gemm.schedule_of(num, outputs, inputs, schedules, is_fixed=is_fixed)

    for module in (linear8a16, linear4):
        monkeypatch.setattr(module, "gpu_of", lambda device: GpuTraits("", capability, 2))
        monkeypatch.setattr(module, "schedule_of", schedule_of)
    x = inputs(1, 256, torch.float16)
    linear8a16.linear_w8a16(x, planes_of_8(weights8(16, 256, torch.int8)))
    for group in (64, 32):
        linear4.linear_w4a16(x, planes_of_4(weights4(16, 256, group)[0]))
    little = [WIDENED8_IN_LITTLE, WIDENED4_IN_LITTLE, WIDENED4_IN_LITTLE]
    assert asked == (little if capability == 89 else [WIDENED8, WIDENED4, WIDENED4_BY_32])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [(1000, 48, 256), (2, 1000, 4096), (64, 256, 1024), (128, 300, 520)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_larger_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num, outputs, width = shape
    x, eight = inputs(num, width, dtype), weights8(outputs, width, torch.int8)
    wanted = x.double() @ eight.weight.double().t() * eight.scales.double()
    assert_close(linear8a16.linear_w8a16(x, planes_of_8(eight)), wanted, dtype, 4.0)
    four, exact = weights4(outputs, width, 128 if width % 128 == 0 else width)
    assert_close(linear4.linear_w4a16(x, planes_of_4(four)), x.double() @ exact.t(), dtype, 4.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_float8_does_not_drift_over_many_inputs() -> None:
    x, packed = inputs(2, 16_384, torch.float16).abs(), weights8(16, 16_384, torch.float8_e4m3fn)
    packed = Int8Weight(packed.weight.float().abs().to(torch.float8_e4m3fn), packed.scales)
    rows = linear8.quantise_rows(x, torch.float8_e4m3fn)
    wanted = rows.weight.double() @ packed.weight.double().t() * packed.scales.double() * rows.scales.double()[:, None]
    assert_close(linear8.linear_w8a8(x, packed), wanted, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16, 64), (7, 70, 1100), (66, 130, 80)])
def test_linears_of_one_order(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num, outputs, width = shape
    x, weight = inputs(num, width, dtype), torch.randn(outputs, width).to(dtype)
    bias = torch.randn(outputs).to(dtype) if num % 2 else None
    wanted = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    made = caught(monkeypatch, linear16)
    linear16.linear(x, weight, bias)
    assert_close(made[0].check(), wanted, dtype)


Apply = Callable[[Tensor], Tensor]


def fixed_linears(outputs: int, width: int) -> dict[str, Apply]:
    """Linear layers of each kind, over weights that are multiplied in several parts."""
    eight, four = weights8(outputs, width, torch.int8), weights4(outputs, width, 64)[0]
    float8, weight = weights8(outputs, width, torch.float8_e4m3fn), torch.randn(outputs, width).half()
    return {
        "w8a16": lambda x: linear8a16.linear_w8a16(x, planes_of_8(eight), is_fixed=True),
        "w8a8": lambda x: linear8.linear_w8a8(x, eight, is_fixed=True),
        "fp8": lambda x: linear8.linear_w8a8(x, float8, is_fixed=True),
        "w4a16": lambda x: linear4.linear_w4a16(x, planes_of_4(four), is_fixed=True),
        "16 bits": lambda x: linear16.linear(x, weight),
    }


@pytest.mark.parametrize("name", ["w8a16", "w8a8", "fp8", "w4a16", "16 bits"])
def test_the_bits_of_a_row_depend_on_that_row_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in twos and among more rows than a tile has, where the schedule would otherwise differ."""
    monkeypatch.setattr(np, "matmul", in_one_order)  # which the interpreter takes for products
    apply, x = fixed_linears(33, 1100)[name], inputs(70, 1100, torch.float16)
    assert gemm.schedule_of(1, 33, 1100, is_fixed=False) != gemm.schedule_of(70, 33, 1100, is_fixed=False)
    assert gemm.schedule_of(70, 33, 1100, is_fixed=True) == (gemm.PLAIN.fixed, 2)
    whole = apply(x)
    for rows in (slice(0, 1), slice(65, 66), slice(40, 42)):
        assert torch.equal(apply(x[rows].contiguous()), whole[rows]), rows
