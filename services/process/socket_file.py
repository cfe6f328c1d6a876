"""The file of a Unix socket that a server listens on: claimed by one server at a time, and removed by that server only.

gRPC takes over a path on which another process listens, and at its end removes whatever is there. So gRPC binds a name
beside the path, which is then renamed to the path: gRPC has no file to remove, and removing it is done here.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process import private
from sluice_server.services.process.listening import UNIX

ANSWER_S = 1.0
MAX_SOCKET_PATH = 107  # bytes; the kernel's limit
UNBOUND = ".new"


class SocketFile:
    """The socket's file. Call `claim`, bind `unbound`, `publish` (again when the file `is_gone`), `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unbound = path.with_name(path.name + UNBOUND)
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._lock = -1
        self._published = (0, 0)  # inode and device

    @property
    def is_gone(self) -> bool:
        """Whether the published file has been removed by something else."""
        return self._published != (0, 0) and not os.path.lexists(self.path)

    def claim(self) -> None:
        """Reserve the path for this process until `release` or its end. A file left by a killed server does not
        prevent it. Raises ServiceError LISTEN_FAILED."""
        if self._lock >= 0 and private.is_at(self._lock, self._lock_path):
            return
        if len(os.fsencode(self.unbound)) > MAX_SOCKET_PATH:
            raise self._failed(f"the path of a socket has {MAX_SOCKET_PATH - len(UNBOUND)} bytes at most: shorten it")
        self.release()
        try:
            self._lock = self._locked()
            self._check()
        except OSError as error:
            self.release()
            raise self._failed(f"{error.strerror}: {error.filename or self.path}: make it usable") from error
        except ServiceError:
            self.release()
            raise

    def publish(self) -> None:
        """Rename the bound socket to its path. Raises ServiceError LISTEN_FAILED."""
        try:
            self.unbound.rename(self.path)
            self._published = _identity(self.path.lstat())
        except OSError as error:
            raise self._failed(f"{error.strerror}: make the directory usable") from error

    def release(self) -> None:
        """Remove the socket if it is still this server's, and give up the claim."""
        with contextlib.suppress(OSError):
            if self._published == _identity(self.path.lstat()):
                self.path.unlink()
        self._published = (0, 0)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                if private.is_at(self._lock, self._lock_path):
                    self._lock_path.unlink()  # before unlocking: the next holder must see that its file is gone
            os.close(self._lock)
            self._lock = -1

    def _locked(self) -> int:
        """Returns the locked file beside the socket. Raises OSError, and ServiceError if another server holds it."""
        while True:
            lock = private.open_file(self._lock_path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise self._failed(f"another server is there (it holds {self._lock_path}): stop it") from None
            if private.is_at(lock, self._lock_path):
                return lock
            os.close(lock)  # the file of a server that has just released it

    def _check(self) -> None:
        """Raise ServiceError unless the path is free, or a socket on which no server answers."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise self._failed("what is there is no socket: move it away")
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(ANSWER_S)
            found = caller.connect_ex(str(self.path))
        if found not in (errno.ECONNREFUSED, errno.ENOENT):  # a full queue is a slow server
            why = "answers" if not found else os.strerror(found)
            raise self._failed(f"another server is there ({why}): stop it")

    def _failed(self, why: str) -> ServiceError:
        text = f"cannot listen on {UNIX}{self.path}: {why}, or choose another path"
        return ServiceError(Code.FAILED_PRECONDITION, "LISTEN_FAILED", text, field="listen")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_dev
