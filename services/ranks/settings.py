"""The settings of a group's processes: which rank a process is, the addresses of all, and the start of the group."""

import dataclasses
import secrets
from collections.abc import Mapping

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import WORKER, ServiceConfig, bad_setting, parse_peers
from sluice_server.services.process.supervised import GROUP_EPOCH

START_S = 600.0  # until all ranks must have joined, and again until each must have loaded its part of the model
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


def rank_table(engine: EngineConfig, service: ServiceConfig, process_id: str) -> RankTable:
    """Returns the place of a process. Raises ServiceError naming the setting at fault."""
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
    if any(not address.startswith("ipc://") for address in addresses.values()):
        raise bad_setting("rank_peers", "ranks of several hosts are not supported yet: give ipc://path of one host")
    return RankTable(rank, ids[0], addresses)


def epoch_of(environment: Mapping[str, str]) -> int:
    """Returns the number of this start of the group as the supervisor told it; 0 without one."""
    text = environment.get(GROUP_EPOCH, "")
    return int(text) if text.isdecimal() else 0


def own_epoch(environment: Mapping[str, str]) -> int:
    """Returns the number of the start that rank 0 begins: the supervisor's, else one that was not used before."""
    return epoch_of(environment) or 1 + secrets.randbelow(_FRESH)


def check_cores(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raises ServiceError for more ranks than cores, as each computes on a core of its own."""
    cores, num = find_cores(), service.engines * engine.num_ranks
    if engine.num_ranks > 1 and num > cores.usable and not service.allow_shared_cores:
        text = f"{num} ranks need as many cores, and {cores.usable} can be used here ({cores})"
        name = "tensor_parallel_size" if engine.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise bad_setting(name, f"{text}; --allow-shared-cores lets them take turns, slowly")


def config_of_rank(engine: EngineConfig) -> EngineConfig:
    """Returns the settings by which one rank computes: its share of the cores and of host memory."""
    size = engine.num_ranks
    threads = engine.threads or max(1, find_cores().usable // size)
    return dataclasses.replace(engine, threads=threads, host_cache_bytes=engine.host_cache_bytes // size)
