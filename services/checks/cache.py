"""Checks of the settings of the cache: its size, and its tiers."""

from pathlib import Path

from sluice_server.engine.config import AUTO, EngineConfig
from sluice_server.engine.kv_cache.block_files import check_directory
from sluice_server.engine.kv_cache.block_size import USUAL
from sluice_server.services.checks.values import at_least
from sluice_server.services.config import bad_setting


def check_cache(engine: EngineConfig) -> None:
    """Raise ServiceError for a cache that cannot have its size, or be resized, or a tier without the one before it."""
    refuse_auto(engine)
    at_least("block_size", engine.block_size, 1)
    for name in (
        *("kv_cache_tokens", "kv_cache_max_tokens", "kv_cache_min_tokens"),
        *("host_cache_bytes", "disk_cache_bytes", "shared_cache_bytes", "encoder_cache_bytes"),
        "weights_offload_bytes",
    ):
        at_least(name, getattr(engine, name), 0)
    if engine.kv_cache_tokens % engine.block_size:
        text = f"{engine.block_size} does not divide --kv-cache-tokens {engine.kv_cache_tokens}"
        raise bad_setting("block_size", text)
    _check_resizing(engine)
    _check_disk_cache(engine)
    _check_shared_cache(engine)


def refuse_auto(engine: EngineConfig) -> None:
    """Raise ServiceError for a block size that is to be chosen: processes that read it must have one number."""
    if engine.block_size == AUTO["auto"]:
        text = "auto is for `sluice serve` of one model, which chooses it for all its processes: give a number"
        raise bad_setting("block_size", f"{text}, as {USUAL}")


def _check_resizing(engine: EngineConfig) -> None:
    start, most, least = engine.kv_cache_tokens, engine.kv_cache_max_tokens, engine.kv_cache_min_tokens
    if most and start > most:
        raise bad_setting("kv_cache_max_tokens", f"{most} is below --kv-cache-tokens {start}")
    if least and start and least > start:
        raise bad_setting("kv_cache_min_tokens", f"{least} is above --kv-cache-tokens {start}")
    if most and engine.num_ranks > 1:
        raise bad_setting("kv_cache_max_tokens", "the cache of several ranks has a fixed size: leave it out")


def _check_disk_cache(engine: EngineConfig) -> None:
    if bool(engine.disk_cache_dir) != bool(engine.disk_cache_bytes):
        raise bad_setting("disk_cache_dir", "needs --disk-cache-bytes, and neither is used without the other")
    if not engine.disk_cache_dir:
        return
    if not engine.host_cache_bytes:
        raise bad_setting("disk_cache_dir", "needs --host-cache-bytes: blocks pass through host memory")
    try:
        check_directory(Path(engine.disk_cache_dir))
    except OSError as error:
        text = f"cannot write to {engine.disk_cache_dir} ({error.strerror}); choose a directory that can be written to"
        raise bad_setting("disk_cache_dir", text) from error


def _check_shared_cache(engine: EngineConfig) -> None:
    if engine.shared_cache_bytes and not engine.prefix_caching:
        raise bad_setting("shared_cache_bytes", "is for blocks of the prefix cache, and --no-prefix-caching has none")
    if engine.kv_store and not engine.shared_cache_bytes:
        raise bad_setting("kv_store", "needs --shared-cache-bytes: the store copies blocks from there")
    if engine.shared_cache_bytes and engine.device == "cuda":
        raise bad_setting("shared_cache_bytes", "is not supported with --device cuda yet: leave one of the two out")
