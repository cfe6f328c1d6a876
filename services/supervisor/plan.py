"""Plans a service: its processes and the addresses they listen on. Pure."""

import dataclasses
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import KV_COST, WORKER, ServiceConfig, parse_peers, to_environment
from sluice_server.services.messages.processes import EngineRole, Role
from sluice_server.services.process.edge_settings import EDGE, edge_of
from sluice_server.services.process.edge_settings import to_environment as edge_environment
from sluice_server.services.process.lane_ring import address_of, lane_settings, ring_of
from sluice_server.services.process.listening import SOCKET_SUFFIX, UNIX
from sluice_server.services.process.model_table import FIRST, LaneEntry, names_of
from sluice_server.services.ranks.here import ranks_here
from sluice_server.services.supervisor.children import Child

PORTS_OF_LANE = 100  # metrics ports from those of one lane to those of the next


def plan_children(engine: EngineConfig, service: ServiceConfig, directory: Path) -> list[Child]:
    """Returns every process of a service with one model; the engine first, as it takes longest to start."""
    service = ring_of(service, directory)
    children = _engines(engine, service, directory, FIRST, 0)
    children += plan_gateways(engine, service, directory, len(children))
    children += _others(engine, service, directory, FIRST, len(children))
    return [*children, *plan_edges(service, directory, len(children))]


def plan_fronts(engine: EngineConfig, service: ServiceConfig, directory: Path) -> list[Child]:
    """Returns the processes of a service that belong to no model: gateways and edges."""
    children = plan_gateways(engine, ring_of(service, directory), directory, 0)
    return [*children, *plan_edges(service, directory, len(children))]


def plan_lane(
    engine: EngineConfig, service: ServiceConfig, directory: Path, lane: str, entry: LaneEntry
) -> list[Child]:
    """Returns the processes of a lane; the engine first."""
    engine, service = lane_settings(engine, service, directory, lane, entry)
    at = PORTS_OF_LANE * (1 + int(lane.removeprefix("m")))
    children = _engines(engine, service, directory, lane, at)
    children += _others(engine, service, directory, lane, at + len(children))
    return [dataclasses.replace(child, lane=lane) for child in children]


def _engines(engine: EngineConfig, service: ServiceConfig, directory: Path, lane: str, at: int) -> list[Child]:
    children: list[Child] = []
    for name in names_of(lane, Role.ENGINE, service.engines):
        children += plan_engine(engine, service, directory, name, at + len(children))
    return children


def plan_gateways(engine: EngineConfig, service: ServiceConfig, directory: Path, at: int) -> list[Child]:
    """Returns the gateways; `service` is what `ring_of` gives."""
    return _of_role(engine, service, directory, Role.GATEWAY, names_of(FIRST, Role.GATEWAY, service.gateways), at)


def _others(engine: EngineConfig, service: ServiceConfig, directory: Path, lane: str, at: int) -> list[Child]:
    tokenizers = names_of(lane, Role.TOKENIZER, service.tokenizers)
    detokenizers = names_of(lane, Role.DETOKENIZER, service.detokenizers)
    made = _of_role(engine, service, directory, Role.TOKENIZER, tokenizers, at)
    return [*made, *_of_role(engine, service, directory, Role.DETOKENIZER, detokenizers, at + len(made))]


def _of_role(
    engine: EngineConfig, service: ServiceConfig, directory: Path, role: Role, names: tuple[str, ...], at: int
) -> list[Child]:
    owns = [own_of(service, role, name, directory, at + num) for num, name in enumerate(names)]
    environments = [to_environment(_reporting(engine, service), own) for own in owns]
    return [Child(name, role, environment) for name, environment in zip(names, environments, strict=True)]


def own_of(service: ServiceConfig, role: Role, name: str, directory: Path, at: int) -> ServiceConfig:
    """Returns the settings of one process of the ring, the number `at` of the service."""
    return dataclasses.replace(
        service,
        role=role,
        process_id=name,
        inbox=address_of(directory, name),
        heartbeat_dir=str(directory),
        metrics_port=service.metrics_port and service.metrics_port + at,
    )


def _reporting(engine: EngineConfig, service: ServiceConfig) -> EngineConfig:
    """Returns the settings of engines that report their caches if a router needs it."""
    return dataclasses.replace(engine, kv_events=True) if service.routing == KV_COST else engine


def plan_engine(engine: EngineConfig, service: ServiceConfig, directory: Path, name: str, at: int) -> list[Child]:
    """Returns the processes of one of `service.engines` engines; `service` is what `ring_of` gives."""
    own = own_of(service, Role.ENGINE, name, directory, at)
    is_apart = int(name.rpartition("-")[2]) < service.prefill_engines
    own = dataclasses.replace(own, engine_role=EngineRole.PREFILL if is_apart else EngineRole.BOTH, prefill_engines=0)
    return plan_ranks(_reporting(engine, service), own, directory)


def plan_ranks(engine: EngineConfig, service: ServiceConfig, directory: Path) -> list[Child]:
    """Returns an engine, and the other ranks of its group if it has any. `service` is the engine's own."""
    name, size = service.process_id, engine.num_ranks
    chosen = share_of(engine, service.engines * ranks_here(engine, service), name)
    if size == 1:
        return [Child(name, Role.ENGINE, to_environment(chosen, service))]
    if service.rank_peers:
        names = [*parse_peers("rank", service.rank_peers)][: ranks_here(engine, service)]
    else:
        number = name.removeprefix(f"{Role.ENGINE}-")
        names = [name, *(f"{WORKER}-{number}-{rank}" for rank in range(1, size))]
        addresses = [f"{name}=ipc://{directory}/{WORKER}-{number}-{rank}" for rank, name in enumerate(names)]
        service = dataclasses.replace(service, rank_peers=",".join(addresses))
    made = [Child(name, Role.ENGINE, to_environment(chosen, service), group=name)]
    for worker in names[1:]:
        own = dataclasses.replace(service, role=WORKER, process_id=worker, inbox="", metrics_port=0)
        made.append(Child(worker, None, to_environment(chosen, own), group=name))
    return made


def share_of(engine: EngineConfig, num: int, name: str) -> EngineConfig:
    """Returns the settings of one of `num` engines or ranks of this machine: its share of the cores, unless `threads`
    says otherwise. Engines share a disk cache, unless each has ranks: then it is in a folder of its own."""
    if num == 1:
        return engine
    folder = engine.disk_cache_dir
    if folder and engine.num_ranks > 1:
        folder = str(Path(folder) / name)
    threads = engine.threads or max(1, find_cores().usable // num)
    return dataclasses.replace(engine, threads=threads, disk_cache_dir=folder)


def plan_edges(service: ServiceConfig, directory: Path, num_before: int) -> list[Child]:
    """Returns an edge in front of each gateway, which it reaches by the gateway's Unix socket. `num_before`: processes
    that have ports before theirs."""
    own = dataclasses.replace(service, heartbeat_dir=str(directory))
    made = []
    for at in range(service.gateways if service.http else 0):
        address, name = f"{UNIX}{directory}/{Role.GATEWAY}-{at}{SOCKET_SUFFIX}", f"{EDGE}-{at}"
        metrics_port = service.metrics_port and service.metrics_port + num_before + at
        settings = edge_of(own, address, name, metrics_port=metrics_port)
        made.append(Child(name, None, edge_environment(settings), EDGE))
    return made
