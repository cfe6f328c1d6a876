"""The templates of a service: which processes are forked from them, and since when they can.

The first start waits for them, as what they import all processes need. Each has a spare, forked from it, which takes
its place when it ends. Later starts wait for none: without a template processes are spawned, which takes longer, on a
busy machine ten times as long.
"""

import contextlib
import functools
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from subprocess import Popen
from typing import TypeAlias

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.engine.worker.host.gpus import is_torch_for_cpu
from sluice_server.services.config import ENV_PREFIX
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID, TEMPLATE, TEMPLATE_KIND
from sluice_server.services.process.template import ENGINES, MADE_BY, NAME, STAGES
from sluice_server.services.supervisor.early import EarlyTemplate
from sluice_server.services.supervisor.forked import ForkedProcess, ProcessHandle
from sluice_server.services.supervisor.template_process import TemplateProcess, can_fork

MAX_STARTS = 8  # of one template; one that ends so often is of no use here
COMMAND = "serve"  # of `sluice`: what they fork
DEVICE = f"{ENV_PREFIX}DEVICE"
Start: TypeAlias = Callable[[dict[str, str], Sequence[str], list[int]], ProcessHandle | None]


class Templates:
    """The templates of one service."""

    def __init__(
        self,
        kinds: Sequence[str],
        command: tuple[str, ...],
        ready_fd: int,
        say: Callable[[str], None],
        early: EarlyTemplate | None = None,
    ) -> None:
        """`kinds`: which of them there are. `command` is what starts `sluice`; `ready_fd` is where they say that they
        are ready; `say` prints lines for operators. `early`: the first one, if it has been started."""
        self._kinds = kinds if can_fork() else ()
        self._command = (*command, COMMAND)
        self._ready_fd = ready_fd
        self._say = say
        self._now: dict[str, TemplateProcess] = {}
        self._spare: dict[str, TemplateProcess] = {}
        self._starts: Counter[str] = Counter()
        self._spares: Counter[str] = Counter()  # so far
        if early is not None:
            self._now[STAGES] = TemplateProcess(ForkedProcess(early.pid), socket.socket(fileno=early.socket))
            self._starts[STAGES] += 1
        if STAGES not in self._kinds:
            self.close()

    def turn(self) -> None:
        """Starts those that are not there; called again and again."""
        for kind in self._kinds:
            if kind in self._spare and not self._spare[kind].is_alive:
                self._spare.pop(kind).close()
            if kind in self._now and not self._now[kind].is_alive:
                self._replace(kind)
            if kind in self._now:
                self._start_spare(kind)
            elif self._starts[kind] < MAX_STARTS and not self._waits(kind):
                self._start(kind)

    def heard(self, kind: str) -> None:
        """Takes the word of a template that it can fork; of two, the spare is ready later."""
        if kind in self._now and not self._now[kind].is_ready:
            self._now[kind].is_ready = True
        elif kind in self._spare:
            self._spare[kind].is_ready = True

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
        if not kind:
            return None
        made = self._fork(kind, environment, inherits, files)
        if made is None:
            self._say(
                f"sluice: {environment.get(NAME, '')} is spawned, which takes longer: no template-{kind} can fork"
            )
        return made

    def renew(self) -> None:
        """Has them made anew, so that what is forked from now on is of the files that are installed now."""
        for kind in self._now:
            self._starts[kind], self._spares[kind] = 1, 0
        self._end()

    def close(self) -> None:
        """Ends them; there are no more."""
        self._kinds = ()
        self._end()

    def _end(self) -> None:
        for templates in (self._now, self._spare):
            while templates:
                templates.popitem()[1].close()

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
        self._starts[kind] += 1
        start = self._make if kind == ENGINES else self._spawn
        self._begin(self._now, kind, aside, start)

    def _start_spare(self, kind: str) -> None:
        """Forks a spare, unless there is one, or a template whose spares end again and again."""
        if not self._now[kind].is_ready or kind in self._spare or self._spares[kind] >= MAX_STARTS:
            return
        self._spares[kind] += 1
        self._begin(self._spare, kind, {}, functools.partial(self._fork, kind))

    def _begin(self, templates: dict[str, TemplateProcess], kind: str, aside: dict[str, str], start: Start) -> None:
        own = {SUPERVISOR_PID: str(os.getpid()), TEMPLATE_KIND: kind, **aside}
        with contextlib.suppress(OSError):  # without one, processes are spawned
            asked, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with inner, contextlib.ExitStack() as failed:
                failed.callback(asked.close)
                made = start(own, (TEMPLATE, READY_FD), [inner.fileno(), self._ready_fd])
                if made is not None:
                    templates[kind] = TemplateProcess(made, asked)
                    failed.pop_all()

    def _make(self, own: dict[str, str], inherits: Sequence[str], files: list[int]) -> ProcessHandle:
        """Forks a template, or spawns it."""
        return self._fork(STAGES, own, inherits, files) or self._spawn(own, inherits, files)

    def _fork(
        self, kind: str, environment: dict[str, str], inherits: Sequence[str], files: Sequence[int]
    ) -> ForkedProcess | None:
        while (template := self._now.get(kind)) is not None and template.is_ready:
            with contextlib.suppress(OSError):  # it has ended
                made = template.fork(environment, inherits, files) if template.is_like_this else None
                if made is not None:
                    return made
            self._replace(kind)
        return None

    def _replace(self, kind: str) -> None:
        """Ends a template that is of no use, and has its spare take its place if there is one."""
        self._now.pop(kind).close()
        if kind in self._spare:
            self._now[kind] = self._spare.pop(kind)

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
