"""A template process as its supervisor has it: what it is started with, and how it is asked to fork."""

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sluice_server.services.process.supervised import READY_FD, TEMPLATE, TEMPLATE_KIND
from sluice_server.services.process.template import GO, Fork, Forked
from sluice_server.services.supervisor.forked import ForkedProcess, ProcessHandle

ANSWER_S = 2.0  # forking takes a few milliseconds
MAX_ANSWER_BYTES = 4096
PR_SET_CHILD_SUBREAPER = 36
STATUS = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Cpus_allowed", "Mems_allowed")
Start = Callable[[dict[str, str], Sequence[str], list[int]], ProcessHandle | None]


class TemplateProcess:
    """One template.

    Attributes:
        is_ready: it has said that it can fork.
    """

    def __init__(self, kind: str, start: Start, ready_fd: int, environment: Mapping[str, str]) -> None:
        """`start` starts a process with variables beside this one's, of which some say the numbers of files. `ready_fd`
        is where the template says that it is ready. Raises OSError."""
        self.is_ready = False
        self._outer = dict(os.environ)  # what it forks has these variables too
        self._socket, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        with inner:
            own = {**environment, TEMPLATE_KIND: kind}
            self._process = start(own, (TEMPLATE, READY_FD), [inner.fileno(), ready_fd])

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_like_this(self) -> bool:
        """Whether what it forks has what a process has that this one spawns: variables, control group, priority and
        other things that a process inherits."""
        assert self._process is not None, "it is alive"
        return self._outer == dict(os.environ) and _inherited(self._process.pid) == _inherited(os.getpid())

    def fork(
        self, environment: dict[str, str], inherits: Sequence[str] = (), files: Sequence[int] = ()
    ) -> ForkedProcess | None:
        """Returns a process that is forked now; None if there is none. It may then not be asked again."""
        read, write = os.pipe()
        request = msgspec.msgpack.encode(Fork(environment, tuple(inherits)))
        try:
            _adopt(True)
            socket.send_fds(self._socket, [request], [0, 1, 2, read, *files])
            pid = self._answer()
            if not pid:
                self.end()
                pid = self._answer()  # what it said before it ended
            if not pid:
                return None
            os.write(write, GO)
        except OSError:
            return None
        finally:
            _adopt(False)
            os.close(read)
            os.close(write)
        return ForkedProcess(pid)

    def end(self) -> None:
        """Ends it."""
        if self._process is not None:
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
    """Whether the system lets a process become the parent of what another one forks."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def _adopt(is_wanted: bool) -> None:
    """Has this process become the parent of descendants whose own parents end, or no longer."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


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
