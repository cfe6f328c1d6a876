"""Files and directories of this user alone, in places where other users can write.

In a shared temporary directory anybody can plant a symbolic link, a FIFO or a directory under a name that is known or
guessed. Nothing is opened through a link, waited for, or emptied before it is seen to be ours.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: Path, flags: int) -> int:
    """A descriptor of the regular file of this user at `path`, made with mode 0600 where `flags` have O_CREAT; they
    must not have O_TRUNC. Raises OSError, also for a link, a FIFO, another user's file, or one of two names."""
    assert not flags & os.O_TRUNC  # it would empty the file before anything is known of it
    fd = os.open(path, flags | _SAFE, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
            raise PermissionError(errno.EPERM, "not a file of this user alone", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_directory(path: Path) -> int:
    """A descriptor of the directory of this user alone at `path`. Raises OSError for a link, and for one that
    belongs to, or can be read or written by, another user."""
    fd = os.open(path, _SAFE | os.O_DIRECTORY)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "not a directory of this user alone (mode 0700)", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_directory(path: Path) -> int:
    """A descriptor of the directory at `path`, which is made if it is not there. Raises OSError as `open_directory`."""
    with contextlib.suppress(FileExistsError):  # ours, or `open_directory` says that it is not
        path.mkdir(mode=0o700)
    return open_directory(path)


def is_at(fd: int, path: Path) -> bool:
    """Whether `path` still names what `fd` is open on."""
    try:
        there = path.lstat()
    except OSError:
        return False
    ours = os.fstat(fd)
    return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)
