"""Does what only a start needs in a process apart, which ends with it: one that lives long keeps what it imports."""

import os
import signal
import sys
from collections.abc import Callable, MutableMapping

from sluice_server.services.process.supervised import die_with, leave

TOLD = "TOLD_APART"  # of a process that `told_apart` has forked alone: the number of the file by which it tells
SIGNALLED = 128  # as shells say it: and the signal's number


def told_apart(environment: MutableMapping[str, str], meanwhile: Callable[[], object]) -> bytes | None:
    """Forks this process, which has no threads, and returns None in the one that is forked, whose `environment` says
    how it tells. Here it calls `meanwhile`, and returns what the other has told by `tell`. If that ended and told
    nothing, this process exits as it did. It ends with this one."""
    read, write = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        os.close(read)
        die_with(parent)
        environment[TOLD] = str(write)
        return None
    os.close(write)
    meanwhile()
    with os.fdopen(read, "rb") as file:
        told = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        name = signal.Signals(-status).name
        print(f"error: the process that reads the settings was killed by {name}; start again", file=sys.stderr)
    if status or not told:
        raise SystemExit(SIGNALLED - status if status < 0 else status)
    return told


def tell(environment: MutableMapping[str, str], what: Callable[[], bytes]) -> None:
    """Tells what `what` returns and ends this process, if it was forked by `told_apart`; else it returns."""
    number = environment.pop(TOLD, "")
    if not number:
        return
    with os.fdopen(int(number), "wb") as file:
        file.write(what())
    leave(0)
