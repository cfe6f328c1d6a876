"""Watches the ring's processes: starts them, says when they serve, starts again what ended, and stops them all.

A child that dies or sticks breaks the ring: gateways are told (SIGUSR1) so that they close their doors, it is started
again, and they replay what was open. SIGHUP restarts tokenizers, engine and detokenizers one after another (SIGUSR2
tells gateways that it was meant). Knows processes and signals; nothing of what the processes do.
"""

import collections
import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path

from services.supervisor.children import Child, Running
from services.supervisor.restarts import Restarts
from services.supervisor.wakeups import RESTART, STOP, wakeups

TERMINATE_S = 2.0  # what inner processes get to leave after SIGTERM
POLL_S = 0.25  # a child's end wakes us by SIGCHLD; this is for signs of life, and for what could be missed
LAST_WORDS_S = 0.7  # what gateways get to tell their clients that the service ends


class Supervisor:
    """Owns the child processes from start to the last one's end."""

    def __init__(
        self,
        children: list[Child],
        command: tuple[str, ...],
        directory: Path,
        restarts: Restarts,
        say: Callable[[str], None],
    ) -> None:
        """`directory` is the run's own; `say` takes lines for people."""
        self._ready_read, self._ready_write = os.pipe()
        self._children = [Running(child, command, directory, self._ready_write) for child in children]
        self._restarts = restarts
        self._say = say
        self._signals: list[int] = []
        self._serving: set[str] = set()  # gateways that let requests in
        self._lost_at_s: float | None = None
        self._was_ready = False
        self._to_restart: collections.deque[Running] = collections.deque()
        self._restarting: Running | None = None

    def run(self, on_ready: Callable[[str], None], grace_s: float) -> int:
        """Start all, wait for the end; the exit status. `on_ready` gets what the last gateway says of
        itself, its address and its model's revision, once every one serves."""
        with wakeups(self._signals) as wake, contextlib.ExitStack() as cleanup:
            cleanup.callback(self._close_pipe)
            cleanup.callback(self._kill_all)
            for child in self._children:
                child.start()
            return self._watch(wake, on_ready, grace_s)

    def _watch(self, wake: int, on_ready: Callable[[str], None], grace_s: float) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._ready_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(POLL_S):
                    data = os.read(key.fd, 4096)
                    if key.fd == self._ready_read:
                        self._heard(data.decode(), on_ready)
                if any(number in STOP for number in self._signals):
                    return self._drain(grace_s)
                if RESTART in self._signals:
                    self._signals.remove(RESTART)
                    self._to_restart.extend(child for child in self._children if not child.is_gateway)
                if not self._mend(time.monotonic()):
                    return self._give_up()
                self._roll()

    def _heard(self, lines: str, on_ready: Callable[[str], None]) -> None:
        """Gateways say that they let requests in, at first and after every loss."""
        for line in lines.splitlines():
            _, name, told = line.split(maxsplit=2)
            self._serving.add(name)
            if len(self._serving) < sum(child.is_gateway for child in self._children):
                continue
            if not self._was_ready:
                self._was_ready = True
                on_ready(told)
            elif self._lost_at_s is not None:
                self._say(f"sluice: serving again after {time.monotonic() - self._lost_at_s:.1f} s")
            self._lost_at_s = None
            self._restarting = None

    def _mend(self, now_s: float) -> bool:
        """Find who ended, and start again who may; False if the service cannot go on."""
        for child in self._children:
            how = child.ended()
            if how and not self._lost(child, how, now_s):
                return False
            if child.start_at_s is not None and now_s >= child.start_at_s:
                child.start()
        return True

    def _lost(self, child: Running, how: str, now_s: float) -> bool:
        """A child ended: have it started again; False if it must not be."""
        planned = child is self._restarting
        wait_s = 0.0 if planned else self._restarts.wait_s(child.name, now_s)
        if not self._was_ready or wait_s is None:
            why = "too often" if self._was_ready else "before the service was ready"
            self._say(f"sluice: {how}, {why}; the service ends")
            return False
        if not planned:
            self._say(f"sluice: {how}; starting it again" + (f" in {wait_s:.1f} s" if wait_s else ""))
        child.start_at_s = now_s + wait_s
        self._lost_at_s = now_s if self._lost_at_s is None else self._lost_at_s
        if child.is_gateway:
            self._serving.discard(child.name)
        else:
            self._serving.clear()
            for gateway in self._of(is_gateway=True):
                gateway.signal(signal.SIGUSR2 if planned else signal.SIGUSR1)
        return True

    def _roll(self) -> None:
        """Restart the next one, when the last one serves again."""
        if self._restarting is None and self._to_restart and self._was_ready and self._lost_at_s is None:
            self._restarting = self._to_restart.popleft()
            self._say(f"sluice: restarting {self._restarting.name}")
            self._restarting.signal(signal.SIGTERM)

    def _give_up(self) -> int:
        """Let gateways tell their clients, then end everything."""
        self._end(self._of(is_gateway=True), LAST_WORDS_S)
        return 1

    def _drain(self, grace_s: float) -> int:
        """Asked to stop: gateways finish what runs, then the rest leaves. A second signal is fast."""
        num_signals = len(self._signals)
        self._end(self._of(is_gateway=True), grace_s + TERMINATE_S, num_signals)
        self._end(self._of(is_gateway=False), TERMINATE_S, num_signals)
        return 0

    def _end(self, children: list[Running], seconds: float, num_signals: int | None = None) -> None:
        """SIGTERM, and so long for them to leave; a further signal to us is the end of patience."""
        for child in children:
            child.signal(signal.SIGTERM)
        end_s = time.monotonic() + seconds
        for child in children:
            while child.is_running and time.monotonic() < end_s:
                if num_signals is not None and any(number in STOP for number in self._signals[num_signals:]):
                    return
                child.wait(0.02)

    def _of(self, *, is_gateway: bool) -> list[Running]:
        return [child for child in self._children if child.is_gateway is is_gateway]

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()

    def _close_pipe(self) -> None:
        os.close(self._ready_read)
        os.close(self._ready_write)
