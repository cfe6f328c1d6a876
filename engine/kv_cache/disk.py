"""Manages the directory of the cache's disk tier: checks that it is usable and lists its blocks. Stdlib only."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".kv"
UNFINISHED = ".part"
MILLISECOND = 1_000_000  # in nanoseconds


def check_directory(directory: Path) -> None:
    """Creates `directory` if needed. Raises OSError unless files can be created in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / f"probe-{os.getpid()}{UNFINISHED}"
    create(probe, b"")
    probe.unlink()


def create(path: Path, data: bytes) -> None:
    """Writes a new file. Raises OSError if the path exists, also as a link, since that may lead anywhere."""
    with path.open("xb") as file:
        file.write(data)


def names_on_disk(directory: Path) -> tuple[bytes, ...]:
    """Returns the names of the blocks that an earlier process left, oldest first; removes its unfinished files."""
    for part in directory.glob(f"*{UNFINISHED}"):
        part.unlink(missing_ok=True)
    files = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    return tuple(bytes.fromhex(path.stem) for path in files if _is_name(path.stem))


def keep_only(directory: Path, names: Sequence[bytes]) -> None:
    """Removes the files of blocks that are not among these names, and unfinished ones."""
    known = set(names)
    for name in names_on_disk(directory):
        if name not in known:
            (directory / f"{name.hex()}{SUFFIX}").unlink(missing_ok=True)


def order_files(paths: Sequence[Path]) -> None:
    """Dates files of blocks, oldest first; those that are not there, or are another user's, are left out."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now - (len(paths) - i) * MILLISECOND))


def _is_name(stem: str) -> bool:
    return len(stem) == 64 and all(digit in "0123456789abcdef" for digit in stem)
