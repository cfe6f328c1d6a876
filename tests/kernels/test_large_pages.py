"""Memory for weights: of the size asked for, and with or without large pages the same to its user."""

import mmap

import pytest
import torch

from kernels import memory


@pytest.mark.parametrize("num", [0, 100, memory.HUGE, 2 * memory.HUGE + 12])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_it_holds_what_is_put_in(num: int, dtype: torch.dtype) -> None:
    vector = memory.empty(num, dtype)
    assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((num,), dtype, True)
    vector.fill_(3)
    assert bool((vector == 3).all())


def test_large_ones_begin_at_a_large_page() -> None:
    assert memory.empty(memory.HUGE + 1, torch.uint8).data_ptr() % memory.HUGE == 0


def test_a_system_without_large_pages_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not know the advice, and one that refuses it."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 255)
    assert memory.empty(memory.HUGE, torch.float32).fill_(1).sum() == memory.HUGE
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert memory.empty(memory.HUGE, torch.uint8).shape == (memory.HUGE,)
