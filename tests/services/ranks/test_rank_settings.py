"""Which rank a process is, and what it may use of the machine."""

import dataclasses

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks.settings import check_cores, config_of_rank, epoch_of, own_epoch, rank_table

TWO = EngineConfig(tensor_parallel_size=2, host_cache_bytes=1000)
PEERS = "engine-0=ipc:///a,worker-0-1=ipc:///b"


def test_the_table_names_ranks_in_their_order() -> None:
    table = rank_table(TWO, ServiceConfig(role="worker", rank_peers=PEERS), "worker-0-1")
    assert (table.rank, table.leader, table.others) == (1, "engine-0", ("worker-0-1",))
    assert rank_table(TWO, ServiceConfig(role="engine", rank_peers=PEERS), "engine-0").rank == 0


@pytest.mark.parametrize(
    ("role", "name", "peers", "text"),
    [
        ("worker", "worker-0-1", "", "has 0 ranks, and --tensor-parallel-size times --pipeline-parallel-size is 2"),
        ("worker", "worker-2", PEERS, "has no worker-2, which is this process: engine-0, worker-0-1"),
        ("worker", "engine-0", PEERS, "engine-0 is rank 0: rank 0 is the engine"),
        ("engine", "worker-0-1", PEERS, "worker-0-1 is rank 1: rank 0 is the engine"),
        ("worker", "worker-0-1", "engine-0", "'engine-0' is not id=tcp://host:port"),
        ("worker", "worker-0-1", "engine-0=tcp://a:1,worker-0-1=tcp://b:1", "ranks of several hosts are not supported"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(role: str, name: str, peers: str, text: str) -> None:
    with pytest.raises(ServiceError, match=text) as refused:
        rank_table(TWO, ServiceConfig(role=role, rank_peers=peers), name)
    assert refused.value.message.startswith("--rank-peers: ")


def test_the_supervisors_number_of_the_start_counts() -> None:
    assert epoch_of({}) == 0
    assert epoch_of({"SLUICE_GROUP_EPOCH": "3"}) == own_epoch({"SLUICE_GROUP_EPOCH": "3"}) == 3
    assert own_epoch({}) != own_epoch({}) != 0


def test_ranks_share_cores_and_host_memory() -> None:
    cores = find_cores().usable
    assert config_of_rank(TWO).threads == max(1, cores // 2)
    assert config_of_rank(dataclasses.replace(TWO, threads=3)).threads == 3
    assert config_of_rank(TWO).host_cache_bytes == 500
    assert config_of_rank(dataclasses.replace(TWO, pipeline_parallel_size=2)).host_cache_bytes == 250


def test_more_ranks_than_cores_are_refused_unless_they_may_share() -> None:
    many = EngineConfig(tensor_parallel_size=find_cores().usable + 1)
    with pytest.raises(ServiceError, match="--allow-shared-cores lets them take turns"):
        check_cores(many, ServiceConfig())
    check_cores(many, ServiceConfig(allow_shared_cores=True))
    check_cores(EngineConfig(), ServiceConfig(engines=64))
    with pytest.raises(ServiceError, match=r"--pipeline-parallel-size: .* ranks need as many cores"):
        check_cores(EngineConfig(pipeline_parallel_size=find_cores().usable + 1), ServiceConfig())
    with pytest.raises(ServiceError, match="--allow-shared-cores"):
        check_cores(TWO, ServiceConfig(engines=find_cores().usable))
