"""A template process as its supervisor has it: what it is started with, and how it is asked to fork."""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sluice_server.services.process.sibling import can_fork_siblings
from sluice_server.services.process.template import GO, Fork, Forked
from sluice_server.services.supervisor.forked import ForkedProcess, ProcessHandle

ANSWER_S = 2.0  # forking takes a few milliseconds
MAX_ANSWER_BYTES = 4096
STATUS = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Cpus_allowed", "Mems_allowed")


class TemplateProcess:
    """One template.

    Attributes:
        is_ready: it has said that it can fork.
    """

    def __init__(self, process: ProcessHandle, asked: socket.socket) -> None:
        """It has the variables that this process has now. It is asked over the socket."""
        self.is_ready = False
        self._outer = dict(os.environ)
        self._process = process
        self._socket = asked
        self._socket.settimeout(ANSWER_S)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def is_like_this(self) -> bool:
        """Whether what it forks has what a process has that this one spawns: variables, control group, priority and
        other things that a process inherits."""
        return self._outer == dict(os.environ) and _inherited(self._process.pid) == _inherited(os.getpid())

    def fork(
        self, environment: dict[str, str], inherits: Sequence[str] = (), files: Sequence[int] = ()
    ) -> ForkedProcess | None:
        """Returns a process that is forked now; None if there is none. It may then not be asked again."""
        read, write = os.pipe()
        request = msgspec.msgpack.encode(Fork(environment, tuple(inherits)))
        try:
            socket.send_fds(self._socket, [request], [0, 1, 2, read, *files])
            pid = self._answer()
            if not pid:
                self.end()
                pid = self._answer()  # what it said before it ended
            if not pid:
                return None
            with contextlib.suppress(OSError):  # it does so too: its group may be signalled at once
                os.setpgid(pid, pid)
            os.write(write, GO)
        except OSError:
            return None
        finally:
            os.close(read)
            os.close(write)
        return ForkedProcess(pid)

    def end(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it, and what is left of it here."""
        self.end()
        self._socket.close()

    def _answer(self) -> int:
        """Returns the process; 0 if there is no answer, or another one."""
        try:
            data = self._socket.recv(MAX_ANSWER_BYTES)
            return msgspec.msgpack.decode(data, type=Forked).pid if data else 0
        except (OSError, msgspec.DecodeError):
            return 0


def can_fork() -> bool:
    """Whether the system lets a process be the parent of what another one forks, and wait for its end: a sandbox may
    refuse the calls."""
    if not can_fork_siblings():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _inherited(pid: int) -> list[object]:
    """Returns what a process passes on to those that it starts. Raises OSError."""
    place = Path(f"/proc/{pid}")
    lines = (place / "status").read_text().splitlines()
    return [
        [line for line in lines if line.partition(":")[0] in STATUS],
        [(place / name).read_text() for name in ("cgroup", "oom_score_adj", "limits")],
        [os.readlink(place / name) for name in ("cwd", "root", "ns/net", "ns/mnt")],
        [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getaffinity(pid)],
    ]
