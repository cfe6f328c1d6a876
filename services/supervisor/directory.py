"""The private directory of a running service, for its sockets, large messages and heartbeats.

It is removed when the service ends, however that happens, and made again if something else removes it. The directory is
locked while the service runs: other supervisors and systemd's cleaner of temporary files leave a locked one alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process import private
from sluice_server.services.process.socket_file import MAX_SOCKET_PATH

RUN_DIRECTORY_PREFIX = "sluice-run-"
LOCK = "lock"  # a file in the directory; services of version 0.1.0 lock it instead of the directory
JUST_MADE_S = 60.0
LONGEST_NAME = 40  # bytes of the prefix, the random part and the longest socket name


class RunDirectory:
    """A directory that this process holds by a lock."""

    def __init__(self, path: Path) -> None:
        """Lock `path`. Raises OSError if it is not private to this user, or locked already."""
        self.path = path
        self._held = _hold(path)
        self._is_lost = False  # and the loss was reported

    def mend(self) -> str:
        """Make the directory again if it was removed. Returns a message for the operator, once; "" if there is
        nothing to report."""
        if private.is_at(self._held, self.path):
            return ""
        try:
            os.close(private.make_directory(self.path))
            held = _hold(self.path)
        except OSError as error:
            was_lost, self._is_lost = self._is_lost, True
            return "" if was_lost else _lost(self.path, error)
        os.close(self._held)
        self._held, self._is_lost = held, False
        return f"the run directory {self.path} was removed by something else; it was made again, and its sockets follow"

    def remove(self) -> None:
        """Remove the directory, unless another one is at its path now, and release it."""
        if private.is_at(self._held, self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


@contextlib.contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Make a private directory for the ring's sockets, and remove it at the end. Directories of killed supervisors are
    removed first.

    Raises ServiceError NO_RUN_DIRECTORY if no directory can be made.
    """
    try:
        bases = _bases()
        for stale in (path for base in bases for path in base.glob(f"{RUN_DIRECTORY_PREFIX}*")):
            if _is_stale(stale):
                shutil.rmtree(stale, ignore_errors=True)
        # mkdtemp makes it with mode 0700
        directory = RunDirectory(Path(tempfile.mkdtemp(prefix=RUN_DIRECTORY_PREFIX, dir=_short_enough(bases))))
    except OSError as error:
        raise _no_place(f"no directory for the sockets of this service can be made ({error})") from error
    try:
        yield directory
    finally:
        directory.remove()


def _bases() -> list[Path]:
    """Returns the user's runtime directory, if usable, and the temporary directory. Raises OSError if there is
    neither."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [Path(own)] if own.startswith("/") and _can_be_used(Path(own)) else []
    try:
        return [*bases, Path(tempfile.gettempdir())]
    except FileNotFoundError:  # no temporary directory can be written to
        if bases:
            return bases
        raise


def _short_enough(bases: list[Path]) -> Path:
    """Returns the first base whose path leaves enough bytes for socket names."""
    for base in bases:
        if len(os.fsencode(base)) + LONGEST_NAME <= MAX_SOCKET_PATH:
            return base
    raise _no_place(f"{bases[-1]} is too long for the path of a socket: {MAX_SOCKET_PATH - LONGEST_NAME} bytes at most")


def _can_be_used(base: Path) -> bool:
    """Whether the directory is private to this user and a file can be written in it. `tempfile` tests its candidates
    alike."""
    try:
        os.close(private.open_directory(base))
        with tempfile.TemporaryFile(dir=base) as file:
            file.write(b"x")
    except OSError:
        return False
    return True


def _is_stale(directory: Path) -> bool:
    """Whether the directory is this user's and its supervisor is gone. A living supervisor holds the lock, which it
    takes right after making the directory and before it puts anything into it."""
    with contextlib.ExitStack() as stack:
        try:
            fd = private.open_directory(directory)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.listdir(fd):
                return time.time() - os.fstat(fd).st_mtime > JUST_MADE_S
            with contextlib.suppress(FileNotFoundError):
                lock = private.open_file(directory / LOCK, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _hold(path: Path) -> int:
    fd = private.open_directory(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _lost(path: Path, error: OSError) -> str:
    return (
        f"the run directory {path} was removed by something else and cannot be made again ({error.strerror}): what "
        "runs goes on, but a process that ends cannot come back; stop the service and start it again"
    )


def _no_place(message: str) -> ServiceError:
    text = f"{message}; set TMPDIR to a short path of a directory that can be written to and has room"
    return ServiceError(Code.FAILED_PRECONDITION, "NO_RUN_DIRECTORY", text)
