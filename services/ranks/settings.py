"""The settings of a group's processes: which rank a process is, the addresses of all, and the start of the group."""

import dataclasses
import ipaddress
import secrets
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.config import DEFAULTS, EngineConfig
from sluice_server.engine.parallel.options import check_parallel
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.engine.worker.host.gpus import may_have_gpu, no_gpu
from sluice_server.services.config import WORKER, ServiceConfig, bad_setting, parse_peers
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.supervised import GROUP_EPOCH
from sluice_server.services.ranks.here import TCP, check_cores, host_of

START_S = 600.0  # until all ranks must have joined, and again until each must have loaded its part of the model
MAX_PORT = 65535
_FRESH = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class RankTable:
    """The place of a process among the ranks.

    Attributes:
        rank: its number.
        leader: id of rank 0.
        addresses: of every rank's inbox by its id, rank 0 first.
    """

    rank: int
    leader: str
    addresses: Mapping[str, str]

    @property
    def others(self) -> tuple[str, ...]:
        """The ids of all ranks but rank 0."""
        return tuple(self.addresses)[1:]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all ranks, in their order."""
        return tuple(self.addresses)

    @property
    def is_networked(self) -> bool:
        """Whether ranks reach one another over TCP."""
        return self.hosts[0] != ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, as its address names it; "" where ranks are on one host and have paths."""
        return tuple(map(host_of, self.addresses.values()))

    @property
    def num_here(self) -> int:
        """The number of ranks on this rank's host."""
        return self.hosts.count(self.hosts[self.rank])


def rank_table(engine: EngineConfig, service: ServiceConfig, process_id: str) -> RankTable:
    """Returns the place of a process. Raises ServiceError naming the setting at fault."""
    check_parallel(engine)
    addresses = parse_peers("rank", service.rank_peers)
    size = engine.num_ranks
    if len(addresses) != size:
        of_sizes = "--tensor-parallel-size times --pipeline-parallel-size"
        text = f"has {len(addresses)} ranks, and {of_sizes} is {size}: id=address of every rank, 0 first"
        raise bad_setting("rank_peers", text)
    ids = list(addresses)
    if process_id not in ids:
        raise bad_setting("rank_peers", f"has no {process_id}, which is this process: {', '.join(ids)}")
    rank = ids.index(process_id)
    if (service.role == WORKER) == (rank == 0):
        raise bad_setting("rank_peers", f"{process_id} is rank {rank}: rank 0 is the engine, all others are workers")
    _check_addresses(addresses)
    table = RankTable(rank, ids[0], addresses)
    if engine.sum_dtype != DEFAULTS.sum_dtype and not has_sums_between_hosts(table, engine.tensor_parallel_size):
        text = f"{engine.sum_dtype} is for sums that travel between hosts, and every stage of --rank-peers is on one"
        raise bad_setting("sum_dtype", f"{text}: leave it out")
    return table


def has_sums_between_hosts(table: RankTable, tensor_size: int) -> bool:
    """Whether the ranks of a stage are on several hosts."""
    hosts = table.hosts
    return any(len(set(hosts[at : at + tensor_size])) > 1 for at in range(0, len(hosts), tensor_size))


def _check_addresses(addresses: Mapping[str, str]) -> None:
    """Raises ServiceError for addresses that are not all of one kind, or by which others cannot reach a rank."""
    networked = [name for name, address in addresses.items() if address.startswith(TCP)]
    if networked and len(networked) < len(addresses):
        text = "has ranks on ipc:// and on tcp://: give tcp://host:port of every rank, or ipc://path where all are here"
        raise bad_setting("rank_peers", text)
    by_address: dict[str, str] = {}
    for name, address in addresses.items():
        if address in by_address:
            text = f"{by_address[address]} and {name} have one address, {address}: give each rank its own"
            raise bad_setting("rank_peers", text)
        by_address[address] = name
        if name in networked:
            _check_tcp(name, address)


def _check_tcp(name: str, address: str) -> None:
    host, port = host_of(address), address.rpartition(":")[2]
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise bad_setting("rank_peers", f"{address} of {name} is not tcp://host:port, with a port of 1 to {MAX_PORT}")
    if host == "*" or _is_every(host):
        text = f"{address} of {name} is every address of a host; others connect to it: give one of its own"
        raise bad_setting("rank_peers", text)


def _is_every(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def epoch_of(environment: Mapping[str, str]) -> int:
    """Returns the number of this start of the group as the supervisor told it; 0 without one."""
    text = environment.get(GROUP_EPOCH, "")
    return int(text) if text.isdecimal() else 0


def own_epoch(environment: Mapping[str, str], table: RankTable | None = None) -> int:
    """Returns the number of the start that rank 0 begins: the supervisor's, else one that was not used before. No
    supervisor counts the starts of ranks of several hosts."""
    told = 0 if table is not None and table.is_networked else epoch_of(environment)
    return told or 1 + secrets.randbelow(_FRESH)


def check_ranks(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raises ServiceError for ranks that a supervisor cannot start: addresses that do not fit, more than cores, or
    those of a GPU where there is none. The first rank would say so only once all have imported torch."""
    if engine.device == "cuda" and not may_have_gpu():
        raise no_gpu()
    if service.rank_peers:
        if service.engines > 1:
            raise bad_setting("rank_peers", f"is of one engine, and --engines is {service.engines}")
        table = rank_table(engine, service, f"{Role.ENGINE}-0")
        if not table.is_networked:
            text = "needs tcp://host:port of every rank here; leave it out where all are on this host"
            raise bad_setting("rank_peers", text)
        if not service.ring_keys:
            raise bad_setting(
                "ring_keys", "is needed for --rank-peers: TCP is always encrypted; `sluice keys` makes them"
            )
    elif engine.sum_dtype != DEFAULTS.sum_dtype:
        text = f"{engine.sum_dtype} is for sums that travel between hosts, and all ranks are on this one"
        raise bad_setting("sum_dtype", f"{text}: leave it out, or give --rank-peers")
    check_cores(engine, service)


def config_of_rank(engine: EngineConfig, num_here: int = 0, rank: int = 0) -> EngineConfig:
    """Returns the settings by which one rank computes: its share of its host's cores, of host memory and of the disk,
    where it has a folder of its own. `num_here` ranks are on this host; 0: all."""
    size, folder = engine.num_ranks, ""
    if engine.disk_cache_dir:
        name = f"tp{engine.tensor_parallel_size}-pp{engine.pipeline_parallel_size}-rank{rank}"
        folder = str(Path(engine.disk_cache_dir) / name)
    return dataclasses.replace(
        engine,
        threads=engine.threads or max(1, find_cores().usable // (num_here or size)),
        host_cache_bytes=engine.host_cache_bytes // size,
        disk_cache_bytes=engine.disk_cache_bytes // size,
        disk_cache_dir=folder,
    )
