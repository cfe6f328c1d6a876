"""The first template of a service, which is started before its supervisor has imported anything.

A supervisor imports the command line for a third of a second. Meanwhile the template imports what it forks later.
"""

import os
import signal
import socket
import sys
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID, TEMPLATE, TEMPLATE_KIND

EARLY = "EARLY_SLUICE_TEMPLATE"  # of this process alone: its process, its socket, and the ends of its pipe
KIND = "stages"
SETTING = "SLUICE_PROCESS_TEMPLATES"
OTHERS = ("-h", "--help", "--no-process-templates", "--role")  # with these there is none
HANDLED = (  # by a supervisor; a process that it spawns has none of its handlers
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD),
)


class EarlyTemplate(NamedTuple):
    """A template that was started early.

    Attributes:
        pid: of its process.
        socket: the file by which it is asked.
        ready: the ends of the pipe on which it says that it can fork.
    """

    pid: int
    socket: int
    ready: tuple[int, int]


def begin(arguments: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Starts it, if these are the arguments of a service that has templates; `environment` keeps what `take` returns.
    It ends with this process."""
    off = environment.get(SETTING, "1").lower() in ("0", "false", "no", "off", "f", "n")
    has_others = any(word.partition("=")[0] in OTHERS for word in arguments) or "SLUICE_ROLE" in environment
    if sys.platform != "linux" or arguments[:1] != ["serve"] or off or has_others:
        return
    asked, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    own = {
        TEMPLATE: str(inner.fileno()),
        TEMPLATE_KIND: KIND,
        READY_FD: str(write),
        SUPERVISOR_PID: str(os.getpid()),
    }
    command = (sys.executable, "-m", "sluice_server", "serve")
    with inner:
        inner.set_inheritable(True)
        os.set_inheritable(write, True)
        pid = os.posix_spawn(command[0], command, {**environment, **own}, setpgroup=0, setsigdef=HANDLED)
    os.set_inheritable(write, False)
    environment[EARLY] = f"{pid} {asked.detach()} {read} {write}"


def take(environment: MutableMapping[str, str]) -> EarlyTemplate | None:
    """Returns the template that was started early, once; None if there is none."""
    told = environment.pop(EARLY, "")
    if not told:
        return None
    pid, asked, read, write = map(int, told.split())
    return EarlyTemplate(pid, asked, (read, write))
