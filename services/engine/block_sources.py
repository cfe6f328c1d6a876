"""Where an engine process fetches cache blocks from: engines of its host, the store of its host, engines of others."""

import contextlib
import logging
import time

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.transfer import BlockFetcher, BlockSource
from sluice_server.services.config import bad_setting
from sluice_server.services.process.engine_table import EngineTable
from sluice_server.services.process.process import Process
from sluice_server.services.ring.keys import load_keys
from sluice_server.services.transfer.by_nixl import read_by_nixl
from sluice_server.services.transfer.carrier import BlockCarrier, paths_of
from sluice_server.services.transfer.network import NetworkCarrier
from sluice_server.services.transfer.network_peers import places_of
from sluice_server.services.transfer.store_link import SeveralSources, StoreLink

logger = logging.getLogger(__name__)


def fetcher_of(built: BuiltEngine, process: Process, closing: contextlib.ExitStack) -> BlockFetcher | None:
    """Returns what fetches blocks from other engines and the store of this host; None if that is off, or cannot be."""
    if built.shared is None or built.store is None:
        return None
    store = _store(built, process, closing)
    level = store if built.engine.scheduler.cache.tiers is not None else None
    made = (_carrier(built, process, closing), None if level else store, _network(built, process, closing))
    sources = [one for one in made if one is not None]
    if not sources and level is None:
        return None
    fetcher = BlockFetcher(built.engine, SeveralSources(sources), built.store.fill, time.monotonic, level)
    if level is not None:
        built.store.fetch_from(level, fetcher.worth_s)
    return fetcher


def _store(built: BuiltEngine, process: Process, closing: contextlib.ExitStack) -> StoreLink | None:
    """Returns the store of this host; None without one."""
    path = process.engine_config.kv_store
    if not path:
        return None
    assert built.shared is not None and built.store is not None
    link = StoreLink(path, built.shared, built.store.layout, built.store.block_bytes)
    closing.callback(link.close)
    return link


def _carrier(built: BuiltEngine, process: Process, closing: contextlib.ExitStack) -> BlockSource | None:
    """Returns the memory of the other engines of this host; None if this one cannot be reached by them."""
    assert built.shared is not None and built.store is not None
    own = paths_of({"": process.config.inbox}).get("", "")
    if not own:
        return None
    others = _others(process.engines.value, own)
    try:
        carrier = BlockCarrier(own, others, built.shared, built.store.layout, built.store.block_bytes)
    except OSError as error:
        logger.warning("no cache blocks are shared: cannot listen on %s: %s", own, error)
        return None
    closing.callback(carrier.close)
    process.on_engines.append(lambda table: carrier.change(_others(table, own)))
    return carrier


def _network(built: BuiltEngine, process: Process, closing: contextlib.ExitStack) -> BlockSource | None:
    """Returns the blocks of engines of other hosts; None if that is off, or this one is not on TCP."""
    config, own = process.config, process.ring.process_id
    listening = places_of({own: config.inbox}, config.kv_port_offset) if config.kv_port_offset else {}
    if not listening:
        return None
    assert built.shared is not None and built.store is not None
    keys = load_keys(config.ring_keys, own)
    assert keys is not None, "the ring has none on TCP without"

    def others(table: EngineTable) -> dict[str, str]:
        places = places_of({name: entry.address for name, entry in table.items()}, config.kv_port_offset)
        return {name: place for name, place in places.items() if name != own}

    at = others(process.engines.value)
    try:
        carrier = NetworkCarrier(listening[own], at, built.shared, built.store.layout, built.store.block_bytes, keys)
    except OSError as error:
        raise bad_setting("kv_port_offset", str(error)) from error
    closing.callback(carrier.close)
    if config.kv_nixl:
        _read_directly(carrier, own, listening[own], built.store.block_bytes)
    process.on_engines.append(lambda table: carrier.change(others(table)))
    return carrier


def _read_directly(carrier: NetworkCarrier, own: str, place: str, block_bytes: int) -> None:
    """Has NIXL read blocks of other hosts. Raises ServiceError without it."""
    try:
        read_by_nixl(carrier, own, place, block_bytes)
    except (ImportError, OSError) as error:
        raise bad_setting("kv_nixl", f"{error}; see the extra `nixl`") from error
    logger.warning("NIXL authenticates nobody: who reaches its port can read this process's memory and write to it")


def _others(engines: EngineTable, own: str) -> list[str]:
    """Returns where the other engines of this host pass their blocks on."""
    paths = paths_of({name: entry.address for name, entry in engines.items()})
    return [path for path in paths.values() if path != own]
