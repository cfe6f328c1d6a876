"""The directory of the cache's disk tier: whether it can be used and what lies there. Stdlib only; reads no block."""

import os
from pathlib import Path

SUFFIX = ".kv"
UNFINISHED = ".part"


def check_directory(directory: Path) -> None:
    """Raise OSError unless files can be made in `directory`, which is made if it is not there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / f"probe-{os.getpid()}{UNFINISHED}"
    create(probe, b"")
    probe.unlink()


def create(path: Path, data: bytes) -> None:
    """Write a file that is not there yet. Raises OSError for one that is, or a link: it may lead anywhere."""
    with path.open("xb") as file:
        file.write(data)


def names_on_disk(directory: Path) -> tuple[bytes, ...]:
    """Names of the blocks that an earlier process left, oldest first; its unfinished files are removed."""
    for part in directory.glob(f"*{UNFINISHED}"):
        part.unlink(missing_ok=True)
    files = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    return tuple(bytes.fromhex(path.stem) for path in files if _is_name(path.stem))


def _is_name(stem: str) -> bool:
    return len(stem) == 64 and all(digit in "0123456789abcdef" for digit in stem)
