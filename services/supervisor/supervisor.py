"""Watches the service's processes: starts them, reports when they serve, restarts those that ended, and stops them all.

SIGHUP restarts tokenizers, engines and detokenizers one after another. What the end of a process means, `losses` says.
HTTP edges are outside of the ring: one that dies is started again, and no other is told. It handles processes and
signals only.
"""

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable

from sluice_server.services.process.model_commands import Answer, Command
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.command_socket import CommandSocket
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.heard import Heard, name_in
from sluice_server.services.supervisor.losses import Losses
from sluice_server.services.supervisor.moving import NOTHING, Moving
from sluice_server.services.supervisor.processes import Processes, end
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.rolling import RollingRestart
from sluice_server.services.supervisor.templates import Templates
from sluice_server.services.supervisor.wakeups import FEWER, MORE, RESTART, STOP, wakeups

TERMINATE_S = 2.0  # what the processes behind the gateways get to exit after SIGTERM
POLL_S = 0.25  # to read heartbeats, and in case a SIGCHLD is missed
PAUSED_S = 2.0  # a longer gap between two polls: this process was stopped, and perhaps the children too
LAST_WORDS_S = 2.0  # what gateways get to report the end of the service to their clients


class Supervisor:
    """Owns the child processes, from the first start to the last end."""

    def __init__(
        self,
        children: list[Child],
        command: tuple[str, ...],
        directory: RunDirectory,
        restarts: Restarts,
        say: Callable[[str], None],
        moving: Moving = NOTHING,
    ) -> None:
        """`directory` is the run's own; `say` prints lines for operators. `moving`: what joins and leaves."""
        self._ready_read, self._ready_write = os.pipe() if moving.early is None else moving.early.ready
        self._templates = Templates(moving.templates, command, self._ready_write, say, moving.early)
        how = command, directory.path, self._ready_write, restarts.leave_s, self._templates
        self._processes = Processes(children, *how)
        self._scale, self._lanes = moving.engines, moving.lanes
        self._commands = None if self._lanes is None else CommandSocket(directory.path)
        self._heard = Heard()
        self._heard.on_template = self._templates.heard
        if self._lanes is not None:
            reports = self._lanes.reports
            self._heard.on_lanes, self._heard.on_cache = reports.heard, reports.heard_of_cache
        self._directory = directory
        self._restarts = restarts
        self._say = say
        self._signals: list[int] = []
        self._started_s = time.monotonic()
        self._looked_s = self._started_s
        self._rolling = RollingRestart(restarts.leave_s, say)
        self._losses = Losses(self._processes, restarts, self._rolling, self._heard, moving, say)

    def run(self, on_ready: Callable[[str], None], grace_s: float, signals: list[int] | None = None) -> int:
        """Start all processes and wait for the end. Returns the exit status. `on_ready` gets the line of the last
        gateway, its address and its model's revision, once all gateways and edges serve. `signals` has the signals that
        came before."""
        self._signals = self._signals if signals is None else signals
        with (
            wakeups(self._signals) as wake,
            contextlib.ExitStack() as cleanup,
            selectors.DefaultSelector() as selector,
        ):
            cleanup.callback(self._close_pipe)
            cleanup.callback(self._kill_all)
            cleanup.callback(self._templates.close)
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._ready_read, selectors.EVENT_READ)
            if self._commands is not None:
                cleanup.callback(self._commands.close)
                selector.register(self._commands.fileno, selectors.EVENT_READ)
            for child in self._processes.all:
                child.start_at_s = self._started_s
            if self._lanes is not None:
                self._lanes.start(self._started_s, self._processes)
            return self._watch(selector, on_ready, grace_s)

    def _watch(self, selector: selectors.BaseSelector, on_ready: Callable[[str], None], grace_s: float) -> int:
        while self._mend(self._processes.all):
            self._roll()
            self._resize()
            self._look(selector, on_ready)
            if self._num_stops():
                return self._drain(selector, grace_s)
            while RESTART in self._signals:
                self._signals.remove(RESTART)  # atomic, as a signal handler may append meanwhile
                self._rolling.ask(time.monotonic())
                self._templates.renew()
        return self._give_up()

    def _look(self, selector: selectors.BaseSelector, on_ready: Callable[[str], None]) -> None:
        """Wait for an event, or for `_wait_s`, unless a process has ended, and read what gateways report. Before, tell
        them what has changed."""
        if self._lanes is not None and self._lanes.table.take_news():
            self._processes.tell_models()
        for key, _ in selector.select(0.0 if self._losses.has_ended else self._wait_s()):
            if self._commands is not None and key.fd == self._commands.fileno:
                self._commands.take(self._carry_out)
                continue
            data = os.read(key.fd, 4096)
            if key.fd == self._ready_read:
                self._hear(self._heard.lines(data), on_ready)
        now_s = time.monotonic()
        if self._lanes is not None:
            self._lanes.turn(now_s, {one.name for one in self._processes.gateways}, self._processes)
        if now_s - self._looked_s > PAUSED_S:
            self._losses.wake(now_s)
        self._looked_s = now_s
        mended = self._directory.mend()
        if mended:
            self._say(f"sluice: {mended}")
            self._rewrite(selector)

    def _wait_s(self) -> float:
        """Returns how long to wait for an event: no longer than until a lane that is waited for has had its turn."""
        now_s = time.monotonic()
        due_s = math.inf if self._lanes is None else self._lanes.due_s(now_s)
        return min(POLL_S, due_s - now_s)

    def _rewrite(self, selector: selectors.BaseSelector) -> None:
        """Make anew what was in the run directory."""
        if self._scale is not None:
            self._scale.rewrite()
        if self._lanes is not None and self._commands is not None:
            self._lanes.table.write()
            selector.unregister(self._commands.fileno)
            self._commands.reopen()
            selector.register(self._commands.fileno, selectors.EVENT_READ)

    def _carry_out(self, command: Command) -> Answer:
        assert self._lanes is not None, "commands are about lanes"
        return self._lanes.carry_out(command, time.monotonic(), self._processes)

    def _hear(self, lines: list[str], on_ready: Callable[[str], None]) -> None:
        """Handle lines of gateways, which report that they admit requests, at first and after every loss of a process
        of the ring, and which engines serve; and of edges, when they listen."""
        now_s = time.monotonic()
        for line in lines:
            is_gateway = any(name_in(line) == gateway.name for gateway in self._processes.gateways)
            if not self._heard.take(line, is_gateway=is_gateway):
                continue
            if len(self._heard.serving) < len(self._processes.gateways) + len(self._processes.edges):
                continue
            if self._losses.serve(now_s):
                on_ready(self._heard.address)

    def _mend(self, children: list[Running]) -> bool:
        """Find the children that ended, and start those that may start again. Returns False if the service cannot go
        on."""
        self._templates.turn()
        return self._losses.mend(children)

    def _roll(self) -> None:
        """Go on with a rolling restart."""
        is_whole = self._losses.is_whole and not (self._scale is not None and self._scale.is_busy)
        is_settled = self._lanes is None or self._lanes.is_settled
        self._rolling.go_on(self._processes.inner, time.monotonic(), is_whole=is_whole and is_settled)

    def _resize(self) -> None:
        """Go on with an engine that joins or leaves, or begin with the next one while the service is whole."""
        if self._scale is None:
            return
        for number, more in ((MORE, 1), (FEWER, -1)):
            while number in self._signals:
                self._signals.remove(number)
                self._scale.ask(more)
        if self._scale.is_busy or (self._losses.is_whole and self._rolling.is_over(self._processes.inner)):
            states = self._heard.states([one.name for one in self._processes.gateways])
            self._scale.turn(time.monotonic(), self._processes, states, self._restarts.return_s)

    def _give_up(self) -> int:
        """Let gateways end open requests as UNAVAILABLE, and edges tell their clients; then end everything."""
        end(self._processes.gateways, LAST_WORDS_S, signal.SIGQUIT, self._num_stops)
        end(self._processes.edges, LAST_WORDS_S, signal.SIGTERM, self._num_stops)
        return 1

    def _drain(self, selector: selectors.BaseSelector, grace_s: float) -> int:
        """Stop the service: gateways and edges finish running requests while the ring is kept working, then the other
        processes exit. A second signal stops at once."""
        fronts = [*self._processes.edges, *self._processes.gateways]
        num_signals = self._num_stops()
        self._rolling.give_up()
        end_s = time.monotonic() + grace_s + TERMINATE_S
        for front in fronts:
            front.start_at_s = None
            front.signal(signal.SIGTERM)
        while any(front.is_running for front in fronts) and time.monotonic() < end_s:
            self._look(selector, lambda address: None)
            if self._num_stops() > num_signals:
                return 0
            if self._losses.was_ready:
                if not self._mend(self._processes.inner):
                    return self._give_up()
                self._roll()
        end(self._processes.inner, TERMINATE_S + self._restarts.save_s, signal.SIGTERM, self._num_stops)
        return 0

    def _num_stops(self) -> int:
        return sum(number in STOP for number in self._signals)

    def _kill_all(self) -> None:
        for child in self._processes.all:
            child.kill()

    def _close_pipe(self) -> None:
        os.close(self._ready_read)
        os.close(self._ready_write)
