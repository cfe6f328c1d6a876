"""The private directory of a running service: its sockets and signs of life. Gone with it, however it ends."""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RUN_DIRECTORY_PREFIX = "sluice-run-"
LOCK = "lock"
JUST_MADE_S = 60.0


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory for the ring's sockets, removed at the end; those of killed supervisors are removed first."""
    base = Path(tempfile.gettempdir())
    for stale in base.glob(f"{RUN_DIRECTORY_PREFIX}*"):
        if _is_stale(stale):
            shutil.rmtree(stale, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=RUN_DIRECTORY_PREFIX, dir=base))  # mode 0700
    with (directory / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    """Whether its owner is gone: only a living supervisor holds the lock, which it takes right after the directory."""
    if not (directory / LOCK).exists():
        return time.time() - directory.stat().st_mtime > JUST_MADE_S
    try:
        with (directory / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
