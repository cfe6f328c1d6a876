"""Ranks with a GPU each: what is refused before they connect, and how they find one another."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as dist
from torch.distributed import is_gloo_available, is_nccl_available

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.parallel import peer_memory
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.engine.parallel.sums_symmetric import SymmetricSums
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks import devices
from sluice_server.services.ranks.devices import INTERFACE, connect_devices, symmetric_where_possible, take_device
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.rendezvous import Rendezvous, RendezvousStore
from sluice_server.services.ranks.settings import START_S, RankTable, rank_table
from tests.engine.parallel.peers_memory import ThreadMemory, thread_memories
from tests.engine.parallel.test_sums import added, uneven
from tests.engine.parallel.test_sums_nccl import standing_in
from tests.engine.worker.host_device import HostDevice
from tests.services.ranks.hosts import beside, host_group

TWO = EngineConfig(device="cuda", dtype="float32", tensor_parallel_size=2)
PEERS = "engine-0=ipc:///a,worker-0-1=ipc:///b"
CPU = torch.device("cpu")


def table_of(peers: str = PEERS) -> RankTable:
    return rank_table(TWO, ServiceConfig(role="worker", rank_peers=peers), "worker-0-1")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs; those that processes take."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def test_each_rank_takes_a_gpu_of_its_own(gpus: list[int]) -> None:
    for device in ("cuda", "auto"):
        assert take_device(dataclasses.replace(TWO, device=device), table_of()).type == "cuda"
    assert gpus == [1, 1]
    assert take_device(dataclasses.replace(TWO, device="cpu"), table_of()) == CPU
    assert len(gpus) == 2


@pytest.mark.parametrize(
    ("changes", "peers", "text"),
    [
        ({"pipeline_parallel_size": 2}, PEERS, "--pipeline-parallel-size: 2 is not supported over several GPUs yet"),
        ({"expert_parallel": True}, PEERS, "--expert-parallel: True is not supported over several GPUs yet"),
        ({"max_adapters": 2}, PEERS, "--max-adapters: 2 is not supported over several GPUs yet"),
        ({}, "engine-0=tcp://a:1,worker-0-1=tcp://b:1", "--rank-peers: has several hosts"),
    ],
)
def test_what_ranks_on_gpus_do_not_have_is_refused(
    gpus: list[int], changes: dict[str, Any], peers: str, text: str
) -> None:
    with pytest.raises(ServiceError, match=text):
        take_device(dataclasses.replace(TWO, **changes), table_of(peers))
    assert not gpus


def test_more_ranks_than_gpus_are_refused(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    text = "--tensor-parallel-size: 2 ranks need a GPU each, and 1 can be used here: take fewer, or --device cpu"
    with pytest.raises(ServiceError, match=text):
        take_device(TWO, table_of())
    assert not gpus


@pytest.mark.skipif(is_nccl_available(), reason="torch has NCCL")
def test_a_torch_without_nccl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    shape = ParallelShape(tensor_size=2)
    text = "--tensor-parallel-size: this build of torch has no NCCL: install one for CUDA; or use --device cpu"
    with pytest.raises(ServiceError, match=text):
        connect_devices(shape, CPU, Rendezvous(lambda _: None, lambda: None))


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> list[RendezvousStore]:
    """Gloo stands in for NCCL; the stores of ranks that have connected."""
    stores: list[RendezvousStore] = []

    def group(store: RendezvousStore, rank: int, size: int, timeout_s: float) -> Any:  # noqa: ANN401 # untyped
        stores.append(store)
        return standing_in(store, rank, size)

    monkeypatch.setattr(devices, "nccl_group", group)
    monkeypatch.setattr(devices, "CudaDevice", lambda device: HostDevice())
    monkeypatch.setenv(INTERFACE, "eth9")
    return stores


def connected(folder: Path) -> list[NcclSums]:
    """The sums of two ranks that have found one another, which add as one rank does."""
    given, start = uneven(2), uneven(1, seed=1)[0]
    with host_group(folder, dataclasses.replace(TWO, device="cpu"), ["127.0.0.1"] * 2) as ranks:

        def connect(rank: int, rendezvous: Rendezvous) -> RankConnections:
            return connect_devices(ranks.shapes[rank], CPU, rendezvous)

        sums = [one.sums for one in ranks.connected(connect)]
    found: dict[int, torch.Tensor] = {}
    beside([lambda one=one: found.update({one.rank: added(one, given, start)}) for one in sums])  # type: ignore[misc]
    wanted = added(LocalSums(2), given, start)
    assert all(torch.equal(found[rank], wanted) for rank in range(2))
    return [one for one in sums if isinstance(one, NcclSums)]


@pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
def test_ranks_find_one_another_over_the_sockets_of_the_group(tmp_path: Path, gloo: list[RendezvousStore]) -> None:
    """What threads of the group ask the store later is not told on these sockets. Where GPUs do not read one another's
    memory, as here, all that is added goes over the group."""
    assert [type(one) for one in connected(tmp_path)] == [NcclSums] * 2
    for one in gloo:
        one.set("late", b"x")
    assert not any(one.check(["late"]) for one in gloo)
    assert os.environ[INTERFACE] == "eth9", "what the operator says counts"


def refused(rank: int, memory: list[ThreadMemory]) -> ThreadMemory:
    if rank == 1:
        raise RuntimeError("CUDA driver error: invalid device ordinal")
    return memory[rank]


def not_shared(rank: int, memory: list[ThreadMemory]) -> ThreadMemory:
    """As of rank 1 where its device reads something else than rank 0 has written."""
    if rank == 0:
        return memory[0]
    return ThreadMemory([torch.zeros_like(memory[0]._each[0]), memory[0]._each[1]], memory[0]._barrier)


@pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
@pytest.mark.parametrize(
    ("mapped", "kind", "said"),
    [
        (lambda rank, memory: memory[rank], SymmetricSums, ""),
        (refused, NcclSums, "does not map the memory of the other ranks': sums go over NCCL (CUDA driver error"),
        (not_shared, NcclSums, "what GPUs read of one another is not what was written: sums go over NCCL"),
    ],
)
def test_gpus_that_read_one_anothers_memory_add_so_on_all_ranks_or_on_none(  # noqa: PLR0913 # what is told of
    tmp_path: Path,
    gloo: list[RendezvousStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mapped: Callable[[int, list[ThreadMemory]], ThreadMemory],
    kind: type[NcclSums],
    said: str,
) -> None:
    memory = thread_memories(2)
    monkeypatch.setattr(peer_memory, "_reach", lambda store, rank, size: "here")
    monkeypatch.setattr(devices, "map_memory", lambda store, rank, size, floats: mapped(rank, memory))
    sums = connected(tmp_path)
    assert [type(one) for one in sums] == [kind] * 2
    assert {one.timeout_s for one in sums} == {START_S}
    assert said in caplog.text and bool(said) is bool(caplog.records)


@pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
def test_a_gpu_that_fails_in_the_trial_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(ThreadMemory):
        def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    (one,) = thread_memories(1)
    monkeypatch.setattr(devices, "reach_one_another", lambda *given: True)
    monkeypatch.setattr(devices, "map_memory", lambda *given: Lost(one._each, one._barrier))
    monkeypatch.setattr(devices, "CudaDevice", lambda device: HostDevice())
    group = standing_in(dist.HashStore(), 0, 1)
    with pytest.raises(ServiceError, match=r"unspecified launch failure.*: set NCCL_P2P_DISABLE=1, or use"):
        symmetric_where_possible(NcclSums(group, 0, 1, CPU), group, RendezvousStore(Rendezvous(print, print), ""))
