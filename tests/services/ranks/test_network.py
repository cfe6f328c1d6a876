"""Ranks of several hosts: how they find one another, what they listen on, and which carry what."""

import contextlib
import functools
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import RankLost
from sluice_server.engine.parallel.sums import LocalSums, TimedSums
from sluice_server.engine.parallel.sums_gloo import GlooSums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums
from sluice_server.services.ranks.codec import REPORTS
from sluice_server.services.ranks.membership import hello_of
from sluice_server.services.ranks.sockets import REFUSAL_S, open_sockets
from sluice_server.services.ranks.stages_sockets import SocketStages
from sluice_server.services.ring.keys import make_keys
from tests.engine.parallel.test_sums import SHAPE, added, uneven
from tests.services.ranks.hosts import PATIENT_S, beside, host_group
from tests.system.roles import free_ports

A, B = "127.0.0.1", "127.0.0.2"
TWO = EngineConfig(dtype="float32", tensor_parallel_size=2)
FOUR = EngineConfig(dtype="float32", tensor_parallel_size=2, pipeline_parallel_size=2, sum_shards=2)


def of_each(each: Sequence[TimedSums], work: Callable[[TimedSums], torch.Tensor]) -> list[torch.Tensor]:
    """What each gives, at the same time."""
    found: list[torch.Tensor] = []

    def run(one: TimedSums) -> None:
        found.append(work(one))

    beside([functools.partial(run, one) for one in each])
    return found


def listened() -> set[str]:
    found = psutil.Process().net_connections("inet")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in found if one.status == psutil.CONN_LISTEN}


def test_sums_between_hosts_are_those_of_one_and_listen_where_told(tmp_path: Path) -> None:
    before = listened()
    given, start = uneven(2), uneven(1, seed=1)[0]
    wanted = added(LocalSums(2), given, start)
    with host_group(tmp_path, TWO, [A, B]) as group:
        told = {one.removeprefix("tcp://") for one in group.tables[0].addresses.values()}
        sums = [one.sums for one in group.connected()]
        assert all(isinstance(one, GlooSums) for one in sums)
        found = of_each(sums, lambda one: added(one, given, start))
        assert all(torch.equal(one, wanted) for one in found) and len(found) == 2
        own = listened() - before
        assert own >= told
        assert {one.rpartition(":")[0] for one in own - told} == {A, B}, "gloo's, of which each has one"


def test_a_stage_of_one_host_shares_memory_and_stages_send_over_sockets(tmp_path: Path) -> None:
    with host_group(tmp_path, FOUR, [A, A, B, B]) as group:
        last, _, first, _ = found = group.connected()
        assert all(isinstance(one.sums, SharedMemorySums) for one in found)
        assert all(isinstance(one.stages, SocketStages) for one in found)
        given, start = uneven(2), torch.zeros(SHAPE)
        added_up = of_each([one.sums for one in found[2:]], lambda one: added(one, given, start))
        assert torch.equal(added_up[0], added(LocalSums(2), given, start))
        states = torch.randn(3, 5)
        assert last.stages is not None and first.stages is not None
        first.stages.begin()
        last.stages.begin()
        first.stages.send(states, lambda: None)
        assert torch.equal(last.stages.receive(3, 5, lambda: None), states)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_sums_travel_rounded_if_that_is_asked_for(tmp_path: Path, dtype: str) -> None:
    given, start = uneven(2), torch.zeros(SHAPE)
    exact = added(LocalSums(2), given, start)
    with host_group(tmp_path, EngineConfig(tensor_parallel_size=2, sum_dtype=dtype), [A, B]) as group:
        sums = [one.sums for one in group.connected()]
        found = of_each(sums, lambda one: added(one, given, start))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], exact)

        def exactly(one: TimedSums) -> torch.Tensor:
            into = start.clone()
            one.add(into, [given[one.rank]], is_exact=True)
            return into

        kept = of_each(sums, exactly)
        assert torch.equal(kept[0], exact)


def garbage(addresses: set[str]) -> None:
    """What a stranger sends who finds the sockets."""
    for address in addresses:
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as stray:
            stray.sendall(bytes(4096))


def test_a_stranger_at_the_sockets_changes_no_sum(tmp_path: Path) -> None:
    before = listened()
    given, start = uneven(2), torch.zeros(SHAPE)
    with host_group(tmp_path, TWO, [A, B]) as group:
        sums = [one.sums for one in group.connected()]
        garbage(listened() - before)
        found = of_each(sums, lambda one: added(one, given, start))
        assert all(torch.equal(one, added(LocalSums(2), given, start)) for one in found)


@pytest.mark.parametrize("knows_rank_0", [False, True])
def test_a_rank_without_the_groups_key_is_told_so_and_says_nothing(tmp_path: Path, knows_rank_0: bool) -> None:
    """Whether it has another key of rank 0, or rank 0 does not know its own."""
    config = EngineConfig(tensor_parallel_size=2)
    with host_group(tmp_path / "a", config, [A, B]) as group:
        table = group.tables[1]
        group.sockets[1].close()
        make_keys(tmp_path / "b", table.ids)
        if knows_rank_0:
            shutil.copy(tmp_path / "a/engine-0.key", tmp_path / "b/engine-0.key")
        with contextlib.closing(
            open_sockets(table.addresses, "worker-0-1", ("engine-0",), str(tmp_path / "b"))
        ) as other:
            other.send(REPORTS.encode(hello_of(config, 1, 0, "1", "abc")))
            with pytest.raises(
                RankLost, match="engine-0 does not take this rank's key: both must have the same --ring-"
            ):
                other.receive(PATIENT_S)
            assert group.sockets[0]._inbox.poll(100) == 0


def test_a_rank_that_is_reached_and_says_nothing_is_awaited(tmp_path: Path) -> None:
    """It hangs before it answers, and is then ended by its host: that is neither a refused key nor a loss."""
    make_keys(tmp_path, ("engine-0", "worker-0-1"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        table = {"engine-0": f"tcp://{A}:{free_ports(1)[0]}", "worker-0-1": address}
        with contextlib.closing(open_sockets(table, "engine-0", ("worker-0-1",), str(tmp_path))) as ours:
            reached, _ = silent.accept()
            assert ours.receive(REFUSAL_S + 0.5) is None
            reached.close()
            assert ours.receive(0.5) is None
