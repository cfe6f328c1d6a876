"""Watches the service's processes: starts them, reports when they serve, restarts those that ended, and stops them all.

A child that dies or hangs breaks the ring: gateways get SIGUSR1, read who is absent (`services.process.absences`), and
replay its requests at other engines, or stop admitting requests until the child, which is started again, is back.
SIGHUP restarts tokenizers, engines and detokenizers one after another; gateways get SIGUSR2, which marks a planned
restart, and also when a process was sent SIGTERM by somebody else. Only the exit that SIGHUP requested does not count
as a restart; every other end counts. HTTP edges are outside of the ring: one that dies is started again, and no other
is told. It handles processes and signals only.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable

from sluice_server.services.process import absences
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.wakeups import RESTART, STOP, wakeups

TERMINATE_S = 2.0  # what the processes behind the gateways get to exit after SIGTERM
POLL_S = 0.25  # to read heartbeats, and in case a SIGCHLD is missed
PAUSED_S = 2.0  # a longer gap between two polls: this process was stopped, and perhaps the children too
LAST_WORDS_S = 2.0  # what gateways get to report the end of the service to their clients
NEVER_S = float("-inf")


class Supervisor:
    """Owns the child processes, from the first start to the last end."""

    def __init__(
        self,
        children: list[Child],
        command: tuple[str, ...],
        directory: RunDirectory,
        restarts: Restarts,
        say: Callable[[str], None],
        way_back: tuple[str, str] = ("what was changed before it", "start the service again"),
    ) -> None:
        """`directory` is the run's own; `say` prints lines for operators. `way_back`: what to put back, and what to
        do then, if a process does not come back from a requested restart."""
        self._ready_read, self._ready_write = os.pipe()
        self._children = [Running(child, command, directory.path, self._ready_write) for child in children]
        self._directory = directory
        self._restarts = restarts
        self._say = say
        self._way_back = way_back
        self._signals: list[int] = []
        self._gateways = [child for child in self._children if child.is_gateway]
        self._edges = [child for child in self._children if child.is_edge]
        self._inner = [child for child in self._children if not child.is_gateway and not child.is_edge]
        self._serving: set[str] = set()  # gateways that admit requests, edges that listen
        self._address = ""  # and revision, as the gateway said that served last
        self._lost_at_s: float | None = None
        self._was_ready = False
        self._started_s = time.monotonic()
        self._looked_s = self._started_s
        self._awake_since_s = NEVER_S
        self._asked_s = NEVER_S  # processes started before this time are to be restarted
        self._falling: set[str] = set()  # processes that were killed because another one of their group ended
        self._epochs: dict[str, int] = {}  # by group, the number of its present start
        self._leaving: Running | None = None  # asked to exit
        self._leave_by_s = 0.0
        self._returning: Running | None = None  # exited as asked; the service does not serve again yet

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
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._ready_read, selectors.EVENT_READ)
            for child in self._children:
                child.start_at_s = self._started_s
            return self._watch(selector, on_ready, grace_s)

    def _watch(self, selector: selectors.BaseSelector, on_ready: Callable[[str], None], grace_s: float) -> int:
        while self._mend(self._children):
            self._roll()
            self._look(selector, on_ready)
            if self._num_stops():
                return self._drain(selector, grace_s)
            while RESTART in self._signals:
                self._signals.remove(RESTART)  # atomic, as a signal handler may append meanwhile
                self._asked_s = time.monotonic()
        return self._give_up()

    def _look(self, selector: selectors.BaseSelector, on_ready: Callable[[str], None]) -> None:
        """Wait for an event, or for `POLL_S`, and read what gateways report."""
        for key, _ in selector.select(POLL_S):
            data = os.read(key.fd, 4096)
            if key.fd == self._ready_read:
                self._heard(data.decode(), on_ready)
        now_s = time.monotonic()
        if now_s - self._looked_s > PAUSED_S:
            self._awake_since_s = now_s
        self._looked_s = now_s
        mended = self._directory.mend()
        if mended:
            self._say(f"sluice: {mended}")

    def _heard(self, lines: str, on_ready: Callable[[str], None]) -> None:
        """Handle lines of gateways, which report that they admit requests, at first and after every loss of a process
        of the ring; and of edges, when they listen."""
        now_s = time.monotonic()
        for line in lines.splitlines():
            _, name, ready = line.split(maxsplit=2)
            self._serving.add(name)
            if any(name == gateway.name for gateway in self._gateways):
                self._address = ready
            if len(self._serving) < len(self._gateways) + len(self._edges):
                continue
            if not self._was_ready:
                self._was_ready = True
                self._restarts.began(now_s - self._started_s)
                on_ready(self._address)
            elif self._lost_at_s is not None:
                self._say(f"sluice: serving again after {now_s - self._lost_at_s:.1f} s")
            self._restarts.served(now_s)
            self._lost_at_s = None
            self._returning = None

    def _mend(self, children: list[Running]) -> bool:
        """Find the children that ended, and start those that may start again. Returns False if the service cannot go
        on."""
        self._kill_what_does_not_serve()
        now_s = time.monotonic()
        for child in children:
            how = child.ended(self._awake_since_s)
            if how and not self._lost(child, how, now_s):
                return False
            if self._may_start(child, now_s) and not self._start(child, now_s):
                return False
        return True

    def _may_start(self, child: Running, now_s: float) -> bool:
        """Whether a child is to be started now: a group starts once all of its processes have ended."""
        if child.start_at_s is None or now_s < child.start_at_s:
            return False
        return not any(one.name in self._falling for one in (child, *self._mates(child)))

    def _mates(self, child: Running) -> list[Running]:
        """Returns the other processes of a child's group."""
        group = child.child.group
        return [one for one in self._children if group and one.child.group == group and one is not child]

    def _start(self, child: Running, now_s: float) -> bool:
        """Start a child; a failed start counts as an end. Returns False if the service cannot go on."""
        try:
            child.start(self._epochs.get(child.child.group, 1))
        except OSError as error:
            return self._lost(child, f"{child.name} could not be started ({error.strerror})", now_s)
        return True

    def _lost(self, child: Running, how: str, now_s: float) -> bool:
        """Handle the end of a child: schedule its next start. Returns False if it may not start again."""
        if child.name in self._falling:  # its next start is scheduled
            self._falling.discard(child.name)
            if not child.was_killed:
                self._say(f"sluice: {how}, too")
            return True
        is_planned = child is self._leaving
        if is_planned:
            self._leaving, self._returning = None, child
            child.start_at_s = now_s
        elif not self._was_ready:
            self._say(f"sluice: {how}, before the service was ready; the service ends")
            return False
        else:
            wait_s = self._restarts.wait_s(child.name, now_s)
            self._say(self._exit_message(child, how, wait_s))
            if wait_s is None:
                return False
            child.start_at_s = now_s + wait_s
        self._end_group(child, child.start_at_s)
        self._lost_at_s = now_s if self._lost_at_s is None else self._lost_at_s
        if child in self._inner:
            self._serving -= {gateway.name for gateway in self._gateways}
            with contextlib.suppress(OSError):  # without names, gateways take the whole ring for lost
                absences.write(self._directory.path, self._absent())
            for gateway in self._gateways:  # no request is to blame for an end that somebody asked for
                gateway.signal(signal.SIGUSR2 if is_planned or child.was_asked else signal.SIGUSR1)
        else:
            self._serving.discard(child.name)
        return True

    def _absent(self) -> list[str]:
        """Returns the processes of the ring that have ended or are about to."""
        return [one.name for one in self._inner if not one.is_running or one.name in self._falling]

    def _end_group(self, child: Running, start_at_s: float) -> None:
        """Kill the other processes of the group of a child that ended: they can only start together."""
        mates = self._mates(child)
        if mates:
            group = child.child.group
            self._epochs[group] = self._epochs.get(group, 1) + 1
        for mate in mates:
            if mate.has_process:
                mate.kill_for("ended with its group")
                self._falling.add(mate.name)
            mate.start_at_s = start_at_s

    def _exit_message(self, child: Running, how: str, wait_s: float | None) -> str:
        """Returns the line for operators about an unplanned end."""
        soon = f" in {wait_s:.1f} s" if wait_s else ""
        if child is not self._returning:
            what = "its group" if child.child.group else "it"
            again = ", too often; the service ends" if wait_s is None else f"; starting {what} again{soon}"
            return f"sluice: {how}{again}"
        what, then = self._way_back
        if wait_s is None:
            return f"sluice: {how}, too often; the service ends. To go back: put back {what} and {then}"
        num_left = self._restarts.left(child.name)
        return (
            f"sluice: {how} and is not back from the restart that was asked for; starting it again{soon}. To go back: "
            f"put back {what}; the next start takes it. Starts left: {1 + num_left}, then the service ends"
        )

    def _kill_what_does_not_serve(self) -> None:
        """Kill the newest process if the service does not serve within `return_s` of its start. That counts as its
        end."""
        if self._lost_at_s is None or not self._was_ready:
            return
        listening = [edge for edge in self._edges if edge.name in self._serving]
        newest = max((one for one in self._children if one not in listening), key=lambda child: child.started_s)
        if newest.started_s < self._lost_at_s:
            return  # no process was started since the loss
        if time.monotonic() - max(newest.started_s, self._awake_since_s) > self._restarts.return_s:
            newest.kill_for(f"did not bring the service back within {self._restarts.return_s:.1f} s of its start")

    def _roll(self) -> None:
        """Ask the next process of a rolling restart to exit, once the service serves with the previous one."""
        now_s = time.monotonic()
        if self._leaving is not None:
            if now_s > self._leave_by_s:
                self._say(f"sluice: {self._leaving.name} did not leave within {self._restarts.leave_s:g} s; killing it")
                self._leaving.kill_for("did not leave")
            return
        if not self._was_ready or self._lost_at_s is not None:
            return
        for child in self._inner:
            if child.started_s < self._asked_s and child.is_running:
                self._say(f"sluice: restarting {child.name}")
                self._leaving, self._leave_by_s = child, now_s + self._restarts.leave_s
                child.signal(signal.SIGTERM)
                return

    def _give_up(self) -> int:
        """Let gateways end open requests as UNAVAILABLE, and edges tell their clients; then end everything."""
        self._end(self._gateways, LAST_WORDS_S, signal.SIGQUIT)
        self._end(self._edges, LAST_WORDS_S, signal.SIGTERM)
        return 1

    def _drain(self, selector: selectors.BaseSelector, grace_s: float) -> int:
        """Stop the service: gateways and edges finish running requests while the ring is kept working, then the other
        processes exit. A second signal stops at once."""
        fronts = [*self._edges, *self._gateways]
        num_signals = self._num_stops()
        self._asked_s = NEVER_S
        end_s = time.monotonic() + grace_s + TERMINATE_S
        for front in fronts:
            front.start_at_s = None
            front.signal(signal.SIGTERM)
        while any(front.is_running for front in fronts) and time.monotonic() < end_s:
            self._look(selector, lambda address: None)
            if self._num_stops() > num_signals:
                return 0
            if self._was_ready:
                if not self._mend(self._inner):
                    return self._give_up()
                self._roll()
        self._end(self._inner, TERMINATE_S + self._restarts.save_s, signal.SIGTERM)
        return 0

    def _end(self, children: list[Running], seconds: float, number: signal.Signals) -> None:
        """Send a signal and wait `seconds` for the processes to exit. A further stop signal ends the wait."""
        num_stops = self._num_stops()
        for child in children:
            child.signal(number)
        end_s = time.monotonic() + seconds
        for child in children:
            while child.is_running and time.monotonic() < end_s and self._num_stops() == num_stops:
                child.wait(0.02)

    def _num_stops(self) -> int:
        return sum(number in STOP for number in self._signals)

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()

    def _close_pipe(self) -> None:
        os.close(self._ready_read)
        os.close(self._ready_write)
