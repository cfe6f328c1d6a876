"""Memory for weights and cache, with and without large pages: the requested size and the same contents."""

import mmap

import pytest
import torch

from sluice_server.kernels.cpu import memory
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear, gather


@pytest.mark.parametrize("num", [0, 100, memory.HUGE, 2 * memory.HUGE + 12])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_it_holds_what_is_put_in(num: int, dtype: torch.dtype) -> None:
    vector = memory.empty(num, dtype)
    assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((num,), dtype, True)
    vector.fill_(3)
    assert bool((vector == 3).all())


def test_large_ones_begin_at_a_large_page() -> None:
    assert memory.empty(memory.HUGE + 1, torch.uint8).data_ptr() % memory.HUGE == 0


@pytest.mark.parametrize("num", [100, memory.HUGE + 12])
def test_zeros_are_zeros_whatever_was_there_before(num: int) -> None:
    for _ in range(3):
        vector = memory.zeros(num, torch.float32)
        assert vector.shape == (num,) and not vector.any()
        vector.fill_(7)
    if num > memory.HUGE:
        assert vector.data_ptr() % memory.HUGE == 0


def test_a_system_without_large_pages_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the advice, and one that refuses it."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 255)
    assert memory.empty(memory.HUGE, torch.float32).fill_(1).sum() == memory.HUGE
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert memory.empty(memory.HUGE, torch.uint8).shape == (memory.HUGE,)
    assert not memory.zeros(memory.HUGE, torch.uint8).any()


def test_small_ones_share_large_pages() -> None:
    """Small tensors keep their contents and do not overlap."""
    vectors = [torch.arange(700_000).float(), torch.arange(5).to(torch.uint8), torch.arange(300_000).bfloat16()]
    copies = memory.side_by_side(vectors)
    assert copies[0].data_ptr() % memory.HUGE == 0
    for copy, vector in zip(copies, vectors, strict=True):
        assert torch.equal(copy, vector) and copy.dtype is vector.dtype and copy.data_ptr() % memory.PAGE == 0
    assert copies[-1].data_ptr() - copies[0].data_ptr() < 3 * memory.HUGE
    assert memory.side_by_side([]) == []


def test_gathered_weights_multiply_as_before() -> None:
    linears = [weight_formats.pack(torch.randn(96, 48), weights=form) for form in ("float32", "int8", "int4")]
    others = [PackedLinear(torch.randn(4, 48), None)]
    x = torch.randn(3, 48)
    before = [linear.apply(x) for linear in linears]
    gather([*linears, *others])
    assert all(torch.equal(linear.apply(x), y) for linear, y in zip(linears, before, strict=True))
    if all(isinstance(linear, NativeLinear) for linear in linears):
        places = [linear.weight.data_ptr() for linear in linears]
        assert places == sorted(places) and places[-1] - places[0] < memory.HUGE
