"""Which rank a process is, and what it may use of the machine."""

import dataclasses

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks import settings
from sluice_server.services.ranks.here import check_cores
from sluice_server.services.ranks.settings import (
    RankTable,
    check_ranks,
    config_of_rank,
    epoch_of,
    has_sums_between_hosts,
    own_epoch,
    rank_table,
)

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
        ("worker", "worker-0-1", "engine-0=ipc:///a,worker-0-1=tcp://b:1", "has ranks on ipc:// and on tcp://"),
        ("engine", "engine-0", "engine-0=tcp://a:1,worker-0-1=tcp://a:1", "engine-0 and worker-0-1 have one address"),
        (
            "engine",
            "engine-0",
            "engine-0=tcp://a:0,worker-0-1=tcp://b:1",
            "tcp://a:0 of engine-0 is not tcp://host:port",
        ),
        ("engine", "engine-0", "engine-0=tcp://a,worker-0-1=tcp://b:1", "tcp://a of engine-0 is not tcp://host:port"),
        (
            "engine",
            "engine-0",
            "engine-0=tcp://a:1,worker-0-1=tcp://0.0.0.0:1",
            "worker-0-1 is every address of a host",
        ),
        ("engine", "engine-0", "engine-0=tcp://*:1,worker-0-1=tcp://a:1", "engine-0 is every address of a host"),
        ("engine", "engine-0", "engine-0=tcp://[::]:1,worker-0-1=tcp://a:1", "engine-0 is every address of a host"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(role: str, name: str, peers: str, text: str) -> None:
    with pytest.raises(ServiceError, match=text) as refused:
        rank_table(TWO, ServiceConfig(role=role, rank_peers=peers), name)
    assert refused.value.message.startswith("--rank-peers: ")


def test_ranks_of_several_hosts_know_who_is_where() -> None:
    four = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, host_cache_bytes=1000)
    peers = "engine-0=tcp://a:1,x=tcp://a:2,y=tcp://[fd00::1]:1,z=tcp://[fd00::1]:2"
    table = rank_table(four, ServiceConfig(role="worker", rank_peers=peers), "y")
    assert table.is_networked and table.hosts == ("a", "a", "fd00::1", "fd00::1") and table.num_here == 2
    assert not has_sums_between_hosts(table, 2) and has_sums_between_hosts(table, 4)
    assert config_of_rank(four, table.num_here).threads == max(1, find_cores().usable // 2)
    assert config_of_rank(four, table.num_here).host_cache_bytes == 250
    with pytest.raises(ServiceError, match="--sum-dtype: int8 is for sums that travel between hosts"):
        rank_table(dataclasses.replace(four, sum_dtype="int8"), ServiceConfig(role="worker", rank_peers=peers), "y")
    assert not rank_table(TWO, ServiceConfig(role="engine", rank_peers=PEERS), "engine-0").is_networked


@pytest.mark.parametrize(
    ("peers", "keys", "engines", "text"),
    [
        ("engine-0=tcp://a:1,worker-0-1=tcp://b:1", "", 1, "--ring-keys: is needed for --rank-peers"),
        ("engine-0=tcp://a:1,worker-0-1=tcp://b:1", "keys", 2, "--rank-peers: is of one engine, and --engines is 2"),
        (PEERS, "keys", 1, "--rank-peers: needs tcp://host:port of every rank here"),
        ("worker-0-1=tcp://a:1,engine-0=tcp://b:1", "keys", 1, "--rank-peers: engine-0 is rank 1: rank 0 is"),
        ("engine-0=tcp://a:1", "keys", 1, "--rank-peers: has 1 ranks"),
    ],
)
def test_a_supervisor_refuses_ranks_that_it_cannot_start(peers: str, keys: str, engines: int, text: str) -> None:
    with pytest.raises(ServiceError, match=text):
        check_ranks(TWO, ServiceConfig(rank_peers=peers, ring_keys=keys, engines=engines))


def test_a_supervisor_refuses_what_is_for_several_hosts_before_it_starts_ranks() -> None:
    with pytest.raises(
        ServiceError, match="--sum-dtype: int8 is for sums that travel between hosts, and all ranks are"
    ):
        check_ranks(dataclasses.replace(TWO, sum_dtype="int8"), ServiceConfig())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_supervisor_refuses_a_gpu_that_is_not_there(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EngineConfig(device="cuda", tensor_parallel_size=ranks)
    service = ServiceConfig(allow_shared_cores=True)
    monkeypatch.setattr(settings, "may_have_gpu", lambda: False)
    with pytest.raises(ServiceError, match="--device cuda: no CUDA device is usable here; use --device cpu"):
        check_ranks(wanted, service)
    check_ranks(dataclasses.replace(wanted, device="auto"), service)
    monkeypatch.setattr(settings, "may_have_gpu", lambda: True)
    check_ranks(wanted, service)


def test_a_supervisor_counts_the_ranks_of_its_host() -> None:
    many = EngineConfig(tensor_parallel_size=find_cores().usable + 1)
    ids = ["engine-0", *(f"w{rank}" for rank in range(find_cores().usable))]
    here = ",".join(f"{name}=tcp://a:{at + 1}" for at, name in enumerate(ids))
    spread = ",".join(f"{name}=tcp://a{at}:1" for at, name in enumerate(ids))
    with pytest.raises(ServiceError, match="--allow-shared-cores"):
        check_ranks(many, ServiceConfig(rank_peers=here, ring_keys="keys"))
    check_ranks(many, ServiceConfig(rank_peers=spread, ring_keys="keys"))


def test_the_supervisors_number_of_the_start_counts() -> None:
    assert epoch_of({}) == 0
    assert epoch_of({"SLUICE_GROUP_EPOCH": "3"}) == own_epoch({"SLUICE_GROUP_EPOCH": "3"}) == 3
    assert own_epoch({}) != own_epoch({}) != 0
    table = RankTable(0, "a", {"a": "tcp://a:1", "b": "tcp://b:1"})
    assert own_epoch({"SLUICE_GROUP_EPOCH": "3"}, table) != 3, "no supervisor counts the starts on other hosts"


def test_ranks_share_cores_and_host_memory() -> None:
    cores = find_cores().usable
    assert config_of_rank(TWO).threads == max(1, cores // 2)
    assert config_of_rank(dataclasses.replace(TWO, threads=3)).threads == 3
    assert config_of_rank(TWO).host_cache_bytes == 500
    assert config_of_rank(dataclasses.replace(TWO, pipeline_parallel_size=2)).host_cache_bytes == 250
    disk = config_of_rank(dataclasses.replace(TWO, disk_cache_dir="/disk", disk_cache_bytes=80), 0, 1)
    assert (disk.disk_cache_dir, disk.disk_cache_bytes) == ("/disk/tp2-pp1-rank1", 40)
    assert config_of_rank(TWO, 0, 1).disk_cache_dir == ""


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
