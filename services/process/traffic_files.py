"""Keeps what engines saw of their traffic in small files of the user's cache folder, by model, for the next start.

A file is JSON, written as a whole; one that cannot be read counts as none. Nothing in it is of a request: counts alone.
"""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.block_size import NUM_ENDS, SIZES, Traffic
from sluice_server.services.checkpoint.digests import remembered

SUFFIX = ".traffic"
MAX_FILES = 1024
MAX_BYTES = 1 << 16


def prefix_of(engine: EngineConfig, model: str, revision: str) -> str:
    """Returns the path that the files of a model's engines begin with, of its files and its formats; empty if this user
    has no cache folder."""
    digests = remembered().folder
    if digests is None:
        return ""
    told = (model, revision, engine.kv_cache_dtype, engine.dtype, engine.quantization, engine.device)
    return str(digests.parent / "traffic" / hashlib.sha256("\0".join(told).encode()).hexdigest()[:32])


def write(prefix: str, process_id: str, traffic: Traffic) -> None:
    """Writes an engine's file, in place of the one of the run before. Raises OSError."""
    path = Path(f"{prefix}-{process_id}{SUFFIX}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        part.write_bytes(msgspec.json.encode(traffic))
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    found = [one for one in os.scandir(path.parent) if one.is_file()]
    for old in sorted(found, key=lambda one: one.stat().st_mtime)[: max(0, len(found) - MAX_FILES)]:
        Path(old.path).unlink(missing_ok=True)


def read(prefix: str) -> list[Traffic]:
    """Returns what engines of the model wrote, the newest first."""
    start = Path(prefix)
    paths: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        paths = [(one.stat().st_mtime, one) for one in start.parent.glob(f"{start.name}-*{SUFFIX}")]
    return [found for _, path in sorted(paths, reverse=True) if (found := _read(path)) is not None]


def _read(path: Path) -> Traffic | None:
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_BYTES), type=Traffic)
    except (OSError, msgspec.MsgspecError):
        return None
    counts = (found.num_requests, found.num_tokens, found.num_hits, found.num_recomputed, found.num_evicted)
    is_sound = found.block_size in SIZES and len(found.ends) == NUM_ENDS and found.block_bytes >= 0
    is_sound = is_sound and min(*counts, *found.ends, found.token_s) >= 0 and 0 <= found.unused <= 1
    return found if is_sound else None
