"""Memory of each rank's GPU that those of the other ranks read directly: torch's symmetric memory.

It is used where CUDA says that all devices of a group read one another's memory, and all ranks are in the same
namespaces of processes and files, over which torch passes descriptors of memory. A process has it once in its life:
torch counts what a process has told others, and ranks of which one has mapped memory before would wait for each other.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

BARRED = "NCCL_P2P_DISABLE"  # of the environment: how an operator says that GPUs do not reach one another as they say
BACKEND = "CUDA"  # of symmetric memory; others need a library of their own
GROUP: Any = "sluice-sums"  # a process has one group in its life; torch's type of names is not in all its versions


class PeerMemory(Protocol):
    """Memory of all ranks, mapped into each of them: what these sums use of torch's `_SymmetricMemory`."""

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where the memory of each rank begins."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0, /) -> Tensor:
        """Returns a rank's memory as a tensor, from an element on."""

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Puts a barrier into the queue of this rank's device: what follows waits until all ranks' devices are there.
        A device that waits longer than the timeout has failed."""


class MappedMemory:
    """Implements `PeerMemory`, over torch's."""

    def __init__(self, group: dist.ProcessGroup, own: Tensor) -> None:
        """`own`: this rank's memory. Every rank calls this. Raises RuntimeError where a device does not reach it."""
        self._kept = group, own  # torch itself does not keep them
        self._handle: Any = dist._SymmetricMemory.rendezvous(own, GROUP)

    @property
    def buffer_ptrs(self) -> list[int]:
        """Implements `PeerMemory.buffer_ptrs`."""
        return list(self._handle.buffer_ptrs)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """Implements `PeerMemory.get_buffer`."""
        found: Tensor = self._handle.get_buffer(rank, tuple(sizes), dtype, storage_offset)
        return found

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Implements `PeerMemory.barrier`."""
        self._handle.barrier(channel, timeout_ms)


def reach_one_another(store: dist.Store, rank: int, size: int) -> bool:
    """Returns whether all ranks can map the memory of all others. Every rank calls this, with the same store."""
    store.set(f"reaches/{rank}", _reach(store, rank, size))
    found = {bytes(store.get(f"reaches/{one}")) for one in range(size)}
    return len(found) == 1 and b"" not in found


def map_memory(store: dist.Store, rank: int, size: int, floats: int) -> PeerMemory:
    """Returns so many float32 of each rank, which reach one another. Every rank calls this. Raises RuntimeError."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_group_name(GROUP)
    dist._register_process_group(GROUP, group)
    device = torch.device("cuda", torch.cuda.current_device())
    return MappedMemory(group, dist._SymmetricMemory.empty_strided_p2p((floats,), (1,), torch.float32, device, GROUP))


def _reach(store: dist.Store, rank: int, size: int) -> str:
    """Returns the namespaces of this rank if its device reads the memory of all others, else nothing."""
    if os.environ.get(BARRED, "0") not in ("", "0"):
        return ""
    if dist._SymmetricMemory.get_backend(torch.device("cuda")) != BACKEND:
        return ""
    if not all(torch.cuda.can_device_access_peer(rank, other) for other in range(size) if other != rank):
        return ""
    try:
        dist._SymmetricMemory.set_group_info(GROUP, rank, size, store)
    except RuntimeError:  # this process has had a group
        return ""
    return "/".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "mnt"))
