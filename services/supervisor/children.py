"""One process, as its supervisor handles it: start, signals, detection of its end or of a hang, kill."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import exit_reason, heartbeat
from sluice_server.services.process.supervised import GROUP_EPOCH, READY_FD, SUPERVISOR_PID
from sluice_server.services.supervisor.forked import ProcessHandle
from sluice_server.services.supervisor.templates import Templates

ASIDE_TAKES = 10  # times as long as other starts, where one at a low priority has a tenth of a processor


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """What to run.

    Attributes:
        process_id: its name in the peer tables.
        role: its role in the ring; None for an edge, outside of it, and for a rank that is no engine.
        command: that of `sluice`.
        group: names the processes that start and end together; empty for one that is alone.
        lane: of a model that comes and goes; empty for a process that the service cannot be without.
    """

    process_id: str
    role: Role | None
    environment: Mapping[str, str]
    command: str = "serve"
    group: str = ""
    lane: str = ""

    def aside(self) -> "Child":
        """Returns it as a process that starts beside models that serve, and takes less of the processors until then."""
        return dataclasses.replace(self, environment={**self.environment, ASIDE: "1"})


class Running:
    """One child and its current process."""

    def __init__(
        self,
        child: Child,
        command: tuple[str, ...],
        directory: Path,
        ready_fd: int,
        templates: Templates | None = None,
    ) -> None:
        """`command` is what starts `sluice`. `directory` has the heartbeat files. A gateway writes to `ready_fd` when
        it admits requests, an edge when it listens, an engine of a lane when its cache is empty. `templates` fork what
        they can."""
        self.child = child
        self.start_at_s: float | None = None  # set after an end: when to start it again
        self.is_beside = False  # set after an end: whether others serve for it meanwhile
        self.started_s = 0.0  # when the current process was started
        self._command = (*command, child.command)
        self._directory = directory
        self._ready_fd = ready_fd
        self._templates = templates
        self._process: ProcessHandle | None = None
        self._killed_for = ""  # why the supervisor killed it
        self.leave_by_s: float | None = None  # set once it is dismissed: it must exit, and is not started again
        self.was_asked = False  # the last process ended with status 0: somebody sent it SIGTERM

    @property
    def name(self) -> str:
        """The process id in the peer tables."""
        return self.child.process_id

    @property
    def engine(self) -> str:
        """The engine whose process this is: its own name, unless it is another rank of a group."""
        return self.child.group or self.name

    @property
    def is_gateway(self) -> bool:
        """Whether it is a gateway."""
        return self.child.role is Role.GATEWAY

    @property
    def is_edge(self) -> bool:
        """Whether it is an HTTP edge: outside of the ring, in front of a gateway."""
        return self.child.role is None and not self.child.group

    @property
    def _says(self) -> bool:
        """Whether it tells its supervisor something."""
        return self.is_gateway or self.is_edge or (bool(self.child.lane) and self.child.role is Role.ENGINE)

    @property
    def patience(self) -> int:
        """How many times as long as that of others its start may take."""
        return ASIDE_TAKES if self.is_beside else 1

    @property
    def is_running(self) -> bool:
        """Whether the process exists and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_process(self) -> bool:
        """Whether there is a process whose end `ended` has not returned yet."""
        return self._process is not None

    @property
    def was_killed(self) -> bool:
        """Whether the supervisor killed the last process."""
        return bool(self._killed_for)

    def start(self, epoch: int = 1) -> None:
        """Start the process, for the first time or again; `epoch` is the number of its group's start. Raises OSError
        if the system cannot create it."""
        self.start_at_s = None
        self._killed_for = ""
        for left in (heartbeat.path_of(self._directory, self.name), exit_reason.path_of(self._directory, self.name)):
            left.unlink(missing_ok=True)
        own = {SUPERVISOR_PID: str(os.getpid()), READY_FD: str(self._ready_fd)}
        if self.child.group:
            own[GROUP_EPOCH] = str(epoch)
        settings = dict(self.child.environment)
        if self.started_s:
            settings.pop(ASIDE, None)  # requests may wait for it
        if self.is_beside:
            settings[ASIDE] = "1"
        self.started_s = time.monotonic()
        self._process = self._fork({**settings, **own}) or self._spawn({**settings, **own})

    @property
    def is_awaited(self) -> bool:
        """Whether it starts sooner if it starts a moment later."""
        templates = self._templates if self._is_forkable else None
        return templates is not None and templates.is_awaited(self.child.role, dict(self.child.environment))

    @property
    def _is_forkable(self) -> bool:
        return self.child.command == "serve" and not self.child.group

    def _fork(self, own: dict[str, str]) -> ProcessHandle | None:
        if self._templates is None or not self._is_forkable:
            return None
        own.pop(READY_FD)
        inherits, files = ((READY_FD,), (self._ready_fd,)) if self._says else ((), ())
        return self._templates.fork(self.child.role, own, inherits, files)

    def _spawn(self, own: dict[str, str]) -> ProcessHandle:
        return subprocess.Popen(
            self._command,
            env={**os.environ, **own},
            # A terminal's Ctrl-C and Ctrl-Z reach the supervisor only. No session of its own: Linux shares processors
            # between sessions first, where a stage's wake-ups and slices (`engine.worker.host.slices`) count for less.
            process_group=0,
            pass_fds=[self._ready_fd] if self._says else [],
        )

    def ended(self, awake_since_s: float = 0.0) -> str:
        """Returns how the process ended, once; "" while it runs. A stuck process is killed first. Silence before
        `awake_since_s`, when the supervisor itself was stopped, does not count."""
        process = self._process
        if process is None:
            return ""
        sign = heartbeat.read(self._directory, self.name)
        if sign is not None and process.poll() is None:
            now_s = time.monotonic()
            heard = dataclasses.replace(sign, at_s=max(sign.at_s, awake_since_s))
            if heard.is_stuck(now_s):
                self.kill_for(f"was stuck for {heard.silence(now_s):.1f} s")
        if process.poll() is None:
            return ""
        self._sweep(process)
        self._process = None
        self.was_asked = process.returncode == 0 and not self._killed_for
        if self._killed_for:
            return f"{self.name} {self._killed_for}"
        status = process.returncode or 0
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        reason = exit_reason.read(self._directory, self.name)
        return f"{self.name} ended with exit status {status}" + (f" ({reason})" if reason else "")

    def kill_for(self, reason: str) -> None:
        """Send SIGKILL. `ended` returns this reason once the process has ended."""
        if self._process is not None and self._process.poll() is None:
            self._killed_for = self._killed_for or reason
            self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self.is_running and self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, for at most `seconds`."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def kill(self) -> None:
        """Send SIGKILL to the process and its own children, and wait. It works on a stopped process too, without
        SIGCONT."""
        process, self._process = self._process, None
        if process is not None:
            self._sweep(process)
            process.wait()

    def _sweep(self, process: ProcessHandle) -> None:
        """Kill the process's group: itself and its own children. Those that lead sessions end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
