"""How many ranks of an engine are on this host, and whether it has cores for them."""

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import ServiceConfig, bad_setting, parse_peers

TCP = "tcp://"


def host_of(address: str) -> str:
    """Returns the host of tcp://host:port; "" for a path."""
    return address.removeprefix(TCP).rpartition(":")[0].strip("[]") if address.startswith(TCP) else ""


def check_cores(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raises ServiceError for more ranks than cores, as each computes on a core of its own."""
    cores, num = find_cores(), service.engines * ranks_here(engine, service)
    if engine.num_ranks > 1 and num > cores.usable and not service.allow_shared_cores:
        text = f"{num} ranks need as many cores, and {cores.usable} can be used here ({cores})"
        name = "tensor_parallel_size" if engine.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise bad_setting(name, f"{text}; --allow-shared-cores lets them take turns, slowly")


def ranks_here(engine: EngineConfig, service: ServiceConfig) -> int:
    """Returns the number of ranks of one engine that a supervisor starts: those on the host of rank 0."""
    hosts = [host_of(address) for address in parse_peers("rank", service.rank_peers).values()]
    return hosts.count(hosts[0]) if hosts else engine.num_ranks
