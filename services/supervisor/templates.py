"""The templates of a service: which processes are forked from them, and since when they can.

The first start waits for them, as what they import all processes need. Later ones do not: while there is no template,
as one has ended and the next is not ready, processes are spawned, which takes longer.
"""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from subprocess import Popen

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.engine.worker.host.gpus import is_torch_for_cpu
from sluice_server.services.config import ENV_PREFIX
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID, TEMPLATE, TEMPLATE_KIND
from sluice_server.services.process.template import ENGINES, MADE_BY, STAGES
from sluice_server.services.supervisor.early import EarlyTemplate
from sluice_server.services.supervisor.forked import ForkedProcess, ProcessHandle
from sluice_server.services.supervisor.template_process import TemplateProcess, can_fork

MAX_STARTS = 8  # of one template; one that ends so often is of no use here
COMMAND = "serve"  # of `sluice`: what they fork
DEVICE = f"{ENV_PREFIX}DEVICE"


class Templates:
    """The templates of one service."""

    def __init__(
        self, kinds: Sequence[str], command: tuple[str, ...], ready_fd: int, early: EarlyTemplate | None = None
    ) -> None:
        """`kinds`: which of them there are. `command` is what starts `sluice`; `ready_fd` is where they say that they
        are ready. `early`: the first one, if it has been started."""
        self._kinds = kinds if can_fork() else ()
        self._command = (*command, COMMAND)
        self._ready_fd = ready_fd
        self._now: dict[str, TemplateProcess] = {}
        self._starts: Counter[str] = Counter()
        if early is not None:
            self._now[STAGES] = TemplateProcess(ForkedProcess(early.pid), socket.socket(fileno=early.socket))
            self._starts[STAGES] += 1
        if STAGES not in self._kinds:
            self.close()

    def turn(self) -> None:
        """Starts those that are not there; called again and again."""
        for kind in self._kinds:
            if kind in self._now and not self._now[kind].is_alive:
                self._now.pop(kind).close()
            if kind not in self._now and self._starts[kind] < MAX_STARTS and not self._waits(kind):
                self._start(kind)

    def heard(self, kind: str) -> None:
        """Takes the word of a template that it can fork."""
        if kind in self._now:
            self._now[kind].is_ready = True

    def is_awaited(self, role: Role | None, environment: dict[str, str]) -> bool:
        """Whether a process is better forked in a moment than spawned now."""
        kind = self._kind(role, environment)
        if not kind or self._starts[kind] > 1:
            return False
        if kind in self._now:
            return self._now[kind].is_alive and not self._now[kind].is_ready
        return not self._starts[kind] and self._waits(kind)

    def fork(
        self, role: Role | None, environment: dict[str, str], inherits: Sequence[str], files: Sequence[int]
    ) -> ForkedProcess | None:
        """Returns a process that was forked, of which `inherits` says the numbers of `files`; None if it is to be
        spawned."""
        kind = self._kind(role, environment)
        return self._fork(kind, environment, inherits, files) if kind else None

    def renew(self) -> None:
        """Has them made anew, so that what is forked from now on is of the files that are installed now."""
        for kind in self._now:
            self._starts[kind] = 1
        self._end()

    def close(self) -> None:
        """Ends them; there are no more."""
        self._kinds = ()
        self._end()

    def _end(self) -> None:
        while self._now:
            self._now.popitem()[1].close()

    def _kind(self, role: Role | None, environment: dict[str, str]) -> str:
        """Returns the template that forks such a process; "" if none does."""
        kind = MADE_BY.get(role, "") if role is not None else ""
        if kind == ENGINES and not may_fork_engines(environment.get(DEVICE, "auto")):
            return ""
        return kind if kind in self._kinds else ""

    def _waits(self, kind: str) -> bool:
        """Whether a template is forked itself, from one that is not ready."""
        return kind == ENGINES and STAGES in self._now and not self._now[STAGES].is_ready

    def _start(self, kind: str) -> None:
        aside = {ASIDE: "1"} if self._starts[kind] else {}
        own = {SUPERVISOR_PID: str(os.getpid()), **aside}
        self._starts[kind] += 1
        start = self._make if kind == ENGINES else self._spawn
        with contextlib.suppress(OSError):  # without one, processes are spawned
            asked, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with inner:
                named, files = (TEMPLATE, READY_FD), [inner.fileno(), self._ready_fd]
                self._now[kind] = TemplateProcess(start({**own, TEMPLATE_KIND: kind}, named, files), asked)

    def _make(self, own: dict[str, str], inherits: Sequence[str], files: list[int]) -> ProcessHandle:
        """Forks a template, or spawns it."""
        return self._fork(STAGES, own, inherits, files) or self._spawn(own, inherits, files)

    def _fork(
        self, kind: str, environment: dict[str, str], inherits: Sequence[str], files: Sequence[int]
    ) -> ForkedProcess | None:
        template = self._now.get(kind)
        if template is None or not template.is_ready:
            return None
        try:
            made = template.fork(environment, inherits, files) if template.is_like_this else None
        except OSError:  # it has ended
            made = None
        if made is None:
            self._now.pop(kind).close()
        return made

    def _spawn(self, own: dict[str, str], inherits: Sequence[str], files: list[int]) -> ProcessHandle:
        named = dict(zip(inherits, map(str, files), strict=True))
        return Popen(self._command, env={**os.environ, **own, **named}, process_group=0, pass_fds=files)


def kinds_for(engine: EngineConfig) -> tuple[str, ...]:
    """Returns the templates of a service with such engines. Engines with several ranks are spawned, as their other
    ranks are."""
    forks_engines = engine.num_ranks == 1 and may_fork_engines(engine.device)
    return (STAGES, ENGINES) if forks_engines else (STAGES,)


def may_fork_engines(device: str) -> bool:
    """Whether an engine for this device may be forked: none that computes on a GPU, whose libraries do not allow it."""
    return device == "cpu" or is_torch_for_cpu()
