"""Files and directories that are private to this user, in places where other users can write.

In a shared temporary directory, other users can create a symbolic link, a FIFO or a directory under a known or guessed
name. So links are not followed, FIFOs are opened without blocking, and nothing is truncated before it is known to be
ours.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: Path, flags: int) -> int:
    """Returns a descriptor of this user's regular file at `path`. It is created with mode 0600 if `flags` have
    O_CREAT; O_TRUNC is not allowed. Raises OSError, also for a link, a FIFO, another user's file, or a file with two
    names."""
    assert not flags & os.O_TRUNC  # it would empty the file before the checks below
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
    """Returns a descriptor of the private directory at `path`. Raises OSError for a link, and for a directory that
    belongs to another user, or that another user can read or write."""
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
    """Returns a descriptor of the directory at `path`, created if it is missing. Raises OSError as `open_directory`
    does."""
    with contextlib.suppress(FileExistsError):  # `open_directory` checks that it is ours
        path.mkdir(mode=0o700)
    return open_directory(path)


def is_at(fd: int, path: Path) -> bool:
    """Whether `path` still names the file that `fd` is open on."""
    try:
        there = path.lstat()
    except OSError:
        return False
    ours = os.fstat(fd)
    return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)
