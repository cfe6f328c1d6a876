"""Memory that ranks of one process share, as those with a GPU each map that of one another."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.engine.parallel.sums_symmetric import BUFFER_FLOATS, BUFFERS


class ThreadMemory:
    """Implements `PeerMemory` for a rank that is a thread.

    Attributes:
        barriers: that this rank has reached.
    """

    def __init__(self, each: Sequence[Tensor], barrier: threading.Barrier) -> None:
        self.barriers = 0
        self._each = each
        self._barrier = barrier

    @property
    def buffer_ptrs(self) -> list[int]:
        return [one.data_ptr() for one in self._each]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        assert dtype is torch.float32
        return self._each[rank][storage_offset:][: torch.Size(sizes).numel()].view(tuple(sizes))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self.barriers += 1
        try:
            self._barrier.wait(timeout_ms / 1000)
        except threading.BrokenBarrierError:
            raise RuntimeError("the device waits for others no longer") from None


def thread_memories(size: int) -> list[ThreadMemory]:
    """The memory of so many ranks, as each has it; nothing has been written to it."""
    each = [torch.full((BUFFERS * BUFFER_FLOATS,), torch.nan) for _ in range(size)]
    barrier = threading.Barrier(size)
    return [ThreadMemory(each, barrier) for _ in range(size)]
