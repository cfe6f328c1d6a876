"""Turns signals into events that a selector can wait for."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT)
RESTART = signal.SIGHUP
MORE, FEWER = signal.SIGTTIN, signal.SIGTTOU  # one engine


@contextlib.contextmanager
def wakeups(arrived: list[int]) -> Iterator[int]:
    """Yields a descriptor that becomes readable at the signals above and SIGCHLD. Signals are appended to `arrived`."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def note(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in (*STOP, RESTART, MORE, FEWER, signal.SIGCHLD)}
    old = signal.set_wakeup_fd(write)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
