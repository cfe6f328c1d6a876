"""Ranks of several hosts as threads of one process: addresses of the loopback's network stand for hosts."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.ranks.leader import RankGroup
from sluice_server.services.ranks.membership import hello_of
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.network import connect_hosts
from sluice_server.services.ranks.process import RankProcess
from sluice_server.services.ranks.rendezvous import Rendezvous
from sluice_server.services.ranks.settings import RankTable, rank_table
from sluice_server.services.ranks.sockets import RankSockets, open_sockets
from sluice_server.services.ranks.stages_sockets import next_rank
from sluice_server.services.ring.keys import make_keys
from tests.system.roles import free_ports

PATIENT_S = 60.0


def names(size: int) -> list[str]:
    """The ids of ranks."""
    return ["engine-0", *(f"worker-0-{rank}" for rank in range(1, size))]


def peers_of(hosts: list[str]) -> str:
    """The table of ranks on these hosts."""
    ports = free_ports(len(hosts))
    made = zip(names(len(hosts)), hosts, ports, strict=True)
    return ",".join(f"{name}=tcp://{host}:{port}" for name, host, port in made)


@dataclasses.dataclass
class HostGroup:
    """The ranks of a group: their tables, shapes and sockets, and rank 0's end."""

    config: EngineConfig
    tables: list[RankTable]
    shapes: list[ParallelShape]
    sockets: list[RankSockets]

    def connected(self, connect: Callable[[int, Rendezvous], RankConnections] | None = None) -> list[RankConnections]:
        """Lets all ranks join and connect, by `connect` if that is given; returns their connections in order."""
        size, make = len(self.tables), connect or self.connect
        found: list[RankConnections | None] = [None] * size

        def join(rank: int) -> None:
            process = RankProcess(rank, self.sockets[rank], Heartbeat("", ""))
            process.tell(hello_of(self.config, rank, 0, "1", "abc", "peers"))
            next(process.orders())
            found[rank] = process.connect(partial(make, rank))

        def lead() -> None:
            group = RankGroup(self.sockets[0], hello_of(self.config, 0, 7, "1", "abc", "peers"), self.shapes[0])
            group.gather()
            group.connect(partial(make, 0))
            assert group._connections is not None
            found[0] = group._connections

        beside([lead, *((lambda rank=rank: join(rank)) for rank in range(1, size))])
        return [one for one in found if one is not None]

    def connect(self, rank: int, rendezvous: Rendezvous) -> RankConnections:
        given = self.shapes[rank], self.tables[rank], self.sockets[rank], rendezvous
        return connect_hosts(*given, sum_dtype=self.config.sum_dtype)


def beside(works: list[Callable[[], None]]) -> None:
    """Runs each in a thread of its own; raises the first error of one."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def host_group(keys: Path, config: EngineConfig, hosts: list[str]) -> Iterator[HostGroup]:
    """A group with a rank on each of these hosts, whose sockets are open within the block."""
    peers, ids = peers_of(hosts), names(len(hosts))
    make_keys(keys, ids)
    roles = ["engine", *["worker"] * (len(hosts) - 1)]
    tables = [
        rank_table(config, ServiceConfig(role=role, rank_peers=peers), name)
        for role, name in zip(roles, ids, strict=True)
    ]
    shapes = [shape_of(config).of_member(rank) for rank in range(len(hosts))]
    with contextlib.ExitStack() as closing:
        sockets = []
        for table, shape, name in zip(tables, shapes, ids, strict=True):
            others = table.others if table.rank == 0 else (table.leader,)
            sockets.append(open_sockets(table.addresses, name, others, str(keys), next_rank(shape, table.ids)))
            closing.callback(sockets[-1].close)
        yield HostGroup(config, tables, shapes, sockets)
