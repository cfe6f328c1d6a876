"""Float8 products by torch's library: used from the number of rows on from which it was faster, and gives the same."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats import gpu_linear
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu
from sluice_server.kernels.formats.library_product import ROWS, by_library, least_faster, measured_rows
from sluice_server.kernels.formats.packed_weights import Int8Weight, quantise_rows

BF16 = torch.bfloat16
PACKED = quantise_rows(torch.randn(32, 64), torch.float8_e4m3fn)


def given(num: int) -> tuple[Int8Weight, Int8Weight, torch.dtype]:
    return quantise_rows(torch.randn(num, 64), torch.float8_e4m3fn), PACKED, BF16


def product(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
    """What both should compute."""
    found = rows.weight.double() @ packed.weight.double().t() * packed.scales * rows.scales[:, None]
    return found.to(dtype)


def wrong(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
    return product(rows, packed, dtype) * 1.1


def absent(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
    raise RuntimeError("no such product")


def clock(faster: Sequence[int]) -> Callable[[Callable[[], object]], float]:
    """Times of calls in which the library is faster for these numbers of rows, and a little slower otherwise."""
    calls = iter([(num, is_library) for num in reversed(ROWS) for is_library in (False, True)])

    def seconds(call: Callable[[], object]) -> float:
        num, is_library = next(calls)
        return (0.5 if num in faster else 0.97) if is_library else 1.0

    return seconds


@pytest.mark.parametrize(
    ("faster", "found"), [(ROWS, 16), (ROWS[2:], 256), ((16, 64, 4096), 4096), ((16, 64), None), ((), None)]
)
def test_the_library_is_used_where_it_is_faster_for_all_more_rows(faster: Sequence[int], found: int | None) -> None:
    assert least_faster(ROWS, given, product, product, clock(faster), "float8") == found


@pytest.mark.parametrize("theirs", [wrong, absent])
def test_a_library_that_differs_or_is_missing_is_not_used(theirs: Callable[..., Tensor]) -> None:
    assert least_faster(ROWS, given, product, theirs, clock(ROWS), "float8") is None


@pytest.mark.parametrize(("outputs", "dtype"), [(33, BF16), (32, torch.float16)])
def test_what_the_library_cannot_take_is_not_measured(outputs: int, dtype: torch.dtype) -> None:
    assert measured_rows(outputs, 64, dtype, torch.device("cuda")) is None  # no device is asked


def test_torch_computes_the_same() -> None:
    """On a CPU, as it does on a GPU: scales of rows and of columns."""
    rows = quantise_rows(torch.randn(5, 64), torch.float8_e4m3fn)
    found, want = by_library(rows, PACKED, BF16), product(rows, PACKED, BF16)
    assert found.dtype is BF16 and torch.allclose(found.float(), want.float(), rtol=1e-2, atol=1e-2)


def test_a_layer_takes_the_library_from_so_many_rows_on_unless_it_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu_linear, "measured_rows", lambda *_: 8)
    used: list[int] = []

    def library(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
        used.append(len(rows.weight))
        return product(rows, packed, dtype)

    monkeypatch.setattr(gpu_linear, "by_library", library)
    layer = EightBitsOnGpu(PACKED, torch.ones(32, dtype=BF16), BF16)
    assert layer.kernel == "Triton fp8, torch._scaled_mm from 8 rows"
    monkeypatch.setattr(gpu, "family", lambda name: {"linear8": Kernels}[name])
    for num in (7, 8, 9):
        x = torch.randn(num, 64, dtype=BF16)
        want = product(quantise_rows(x, torch.float8_e4m3fn), PACKED, BF16) + 1
        assert torch.equal(layer.apply(x), want) and torch.equal(layer.fixed().apply(x), want)
    assert used == [8, 9]


class Kernels:
    """Our kernels."""

    @staticmethod
    def quantise_rows(x: Tensor, dtype: torch.dtype) -> Int8Weight:
        return quantise_rows(x, dtype)

    @staticmethod
    def linear_w8a8(x: Tensor, packed: Int8Weight, bias: Tensor, *, is_fixed: bool) -> Tensor:
        return product(quantise_rows(x, packed.weight.dtype), packed, x.dtype) + bias
