"""The first template of a service, which is started before its supervisor has imported anything.

A supervisor waits a third of a second for its settings. Meanwhile the template imports what it forks later.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID, TEMPLATE, TEMPLATE_KIND

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


def begin(arguments: Sequence[str], environment: Mapping[str, str]) -> EarlyTemplate | None:
    """Starts it and returns it, if these are the arguments of a service that has templates. It ends with this
    process."""
    off = environment.get(SETTING, "1").lower() in ("0", "false", "no", "off", "f", "n")
    has_others = any(word.partition("=")[0] in OTHERS for word in arguments) or "SLUICE_ROLE" in environment
    if sys.platform != "linux" or arguments[:1] != ["serve"] or off or has_others:
        return None
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
    return EarlyTemplate(pid, asked.detach(), (read, write))
