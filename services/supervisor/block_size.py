"""Chooses the block size of a service with `--block-size auto`, once for all its processes: engines and tokenizers name
the blocks of a prompt alike."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from sluice_server.engine.config import AUTO, EngineConfig
from sluice_server.engine.kv_cache.block_files import DIGEST_BYTES, SUFFIX
from sluice_server.engine.kv_cache.block_size import SIZES, Saved, Traffic, allowed_sizes, choose, merged
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.services.config import ServiceConfig, bad_setting
from sluice_server.services.process.traffic_files import prefix_of, read

NUMBER_BYTES = {"float32": 4, "int8": 1, "fp8": 1}  # of the cache; of the others 2


def with_any_size(engine: EngineConfig, service: ServiceConfig) -> EngineConfig:
    """Returns the settings with a size that stands for the one to be chosen, so that all others can be checked. Raises
    ServiceError where none can be chosen."""
    if engine.block_size != AUTO["auto"]:
        return engine
    if service.models:
        text = "auto is for a service of one model: give each model of --models a block-size, as 32"
        raise bad_setting("block_size", text)
    for name, value in (
        ("kv-store", engine.kv_store),
        ("kv-port-offset", service.kv_port_offset),
        ("rank-peers", service.rank_peers),
    ):
        if value:
            text = f"auto, and --{name}: processes of other services read blocks of their own size: give all one number"
            raise bad_setting("block_size", text)
    if not any(engine.kv_cache_tokens % size == 0 for size in SIZES):
        text = f"auto: none of {', '.join(map(str, SIZES))} divides --kv-cache-tokens {engine.kv_cache_tokens}"
        raise bad_setting("block_size", text)
    return dataclasses.replace(engine, block_size=1)


def with_block_size(
    engine: EngineConfig, service: ServiceConfig, directory: Path, say: Callable[[str], None]
) -> tuple[EngineConfig, ServiceConfig]:
    """Returns the settings with the size that was chosen, and with the files in which engines keep their traffic; what
    was chosen and why is said. `directory`: of the model. Settings with a number stay as they are."""
    if engine.block_size != AUTO["auto"]:
        return engine, service
    prefix = prefix_of(engine, service.model, service.revision)
    traffic = merged(read(prefix)) if prefix else None
    model = read_served(directory, find_plugins(engine.plugins).models)
    allowed = allowed_sizes(engine.kv_cache_tokens, _token_bytes(engine, model))
    chosen = choose(traffic, allowed, _saved(engine, traffic), has_files=bool(engine.disk_cache_dir))
    say(f"sluice: --block-size auto takes {chosen.size}: {chosen.because}")
    return (
        dataclasses.replace(engine, block_size=chosen.size),
        dataclasses.replace(service, traffic_file=prefix),
    )


def _token_bytes(engine: EngineConfig, model: ModelConfig) -> int:
    """Returns about how many bytes keys and values of a token have."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * NUMBER_BYTES.get(engine.kv_cache_dtype, 2)


def _saved(engine: EngineConfig, traffic: Traffic | None) -> Saved:
    """Returns what the run before has left in the directory of the disk cache: files of the size of its blocks."""
    if not engine.disk_cache_dir or traffic is None:
        return Saved()
    num, size = 0, DIGEST_BYTES + traffic.block_bytes
    with contextlib.suppress(OSError):
        num = sum(path.stat().st_size == size for path in Path(engine.disk_cache_dir).rglob(f"*{SUFFIX}"))
    return Saved(num * traffic.block_size, engine.disk_cache_dir)
