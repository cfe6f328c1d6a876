"""Which ranks map one another's memory. Torch's part needs GPUs: here only its groups are made."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel import peer_memory
from sluice_server.engine.parallel.peer_memory import BARRED, GROUP, map_memory, reach_one_another
from tests.engine.parallel.test_sums_nccl import of_each


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Four GPUs, with symmetric memory; pairs of which one does not read the other's."""
    apart: set[tuple[int, int]] = set()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)
    monkeypatch.setattr(dist._SymmetricMemory, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(dist._SymmetricMemory, "set_group_info", lambda *given: None)  # ranks are of one process here
    monkeypatch.delenv(BARRED, raising=False)
    return apart


def found(size: int = 3) -> list[bool]:
    store = dist.HashStore()
    return of_each(range(size), lambda rank: reach_one_another(store, rank, size))


def test_ranks_of_one_place_reach_one_another(gpus: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == [True] * 3
    monkeypatch.setenv(BARRED, "0")
    assert found() == [True] * 3


@pytest.mark.parametrize(
    "bar",
    [
        lambda patch, apart: apart.add((2, 0)),
        lambda patch, apart: patch.setenv(BARRED, "1"),
        lambda patch, apart: patch.setattr(dist._SymmetricMemory, "get_backend", lambda device: None),
        lambda patch, apart: patch.setattr(dist._SymmetricMemory, "get_backend", lambda device: "NVSHMEM"),
        lambda patch, apart: patch.setattr(peer_memory, "_reach", lambda store, rank, size: f"container {rank}"),
    ],
)
def test_all_ranks_know_if_one_does_not_reach_another(
    gpus: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, bar: Callable[..., Any]
) -> None:
    bar(monkeypatch, gpus)
    assert found() == [False] * 3


def test_a_process_that_has_had_a_group_maps_no_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(dist._SymmetricMemory, "get_backend", lambda device: "CUDA")
    monkeypatch.delenv(BARRED, raising=False)
    for is_first in (True, False):
        store, own = dist.HashStore(), [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt")]
        store.set("reaches/1", "/".join(map(str, own)))  # of another process beside this one
        monkeypatch.setattr(peer_memory, "GROUP", "of a test")
        assert reach_one_another(store, 0, 2) is is_first


def test_torch_is_asked_for_memory_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that need a GPU stand in; the group that torch looks up by its name is there while the memory is."""
    asked: list[Any] = []

    class Handle:
        buffer_ptrs = (16, 32)

        def get_buffer(self, *given: Any) -> torch.Tensor:  # noqa: ANN401 # as torch's
            asked.append(given)
            return torch.zeros(given[1])

        def barrier(self, *given: int) -> None:
            asked.append(given)

    def empty(
        size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device, name: str
    ) -> torch.Tensor:
        assert (stride, dtype, str(device), name) == ((1,), torch.float32, "cuda:1", GROUP)
        return torch.zeros(size)

    def rendezvous(own: torch.Tensor, name: Any) -> Handle:  # noqa: ANN401 # torch's own type
        group = dist._resolve_process_group(name)
        assert (group.rank(), group.size()) == (1, 2) and own.shape == (8,)
        return Handle()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist._SymmetricMemory, "empty_strided_p2p", empty)
    monkeypatch.setattr(dist._SymmetricMemory, "rendezvous", rendezvous)
    memory = map_memory(dist.HashStore(), 1, 2, 8)
    assert memory.buffer_ptrs == [16, 32]
    assert memory.get_buffer(1, (4,), torch.float32, 4).shape == (4,)
    memory.barrier(0, 1500)
    assert asked == [(1, (4,), torch.float32, 4), (0, 1500)]
    assert dist._resolve_process_group(GROUP).size() == 2
