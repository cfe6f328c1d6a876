"""Ranks with a GPU each: what is refused before they connect, and how they find one another."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import is_gloo_available, is_nccl_available

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks import devices
from sluice_server.services.ranks.devices import INTERFACE, connect_devices, take_device
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.rendezvous import Rendezvous, RendezvousStore
from sluice_server.services.ranks.settings import RankTable, rank_table
from tests.engine.parallel.test_sums import added, uneven
from tests.engine.parallel.test_sums_nccl import standing_in
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


@pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
def test_ranks_find_one_another_over_the_sockets_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo stands in for NCCL. What its threads ask the store later is not told on these sockets."""
    stores: list[RendezvousStore] = []

    def group(store: RendezvousStore, rank: int, size: int, timeout_s: float) -> Any:  # noqa: ANN401 # untyped
        stores.append(store)
        return standing_in(store, rank, size)

    monkeypatch.setattr(devices, "nccl_group", group)
    monkeypatch.setenv(INTERFACE, "eth9")
    given, start = uneven(2), uneven(1, seed=1)[0]
    with host_group(tmp_path, dataclasses.replace(TWO, device="cpu"), ["127.0.0.1"] * 2) as ranks:

        def connect(rank: int, rendezvous: Rendezvous) -> RankConnections:
            return connect_devices(ranks.shapes[rank], CPU, rendezvous)

        sums = [one.sums for one in ranks.connected(connect)]
        assert all(isinstance(one, NcclSums) for one in sums)
        found: dict[int, torch.Tensor] = {}
        beside([lambda one=one: found.update({one.rank: added(one, given, start)}) for one in sums])  # type: ignore[misc]
        wanted = added(LocalSums(2), given, start)
        assert all(torch.equal(found[rank], wanted) for rank in range(2))
        for one in stores:
            one.set("late", b"x")
        assert not any(one.check(["late"]) for one in stores)
    assert os.environ[INTERFACE] == "eth9", "what the operator says counts"
