"""Turns signals into events that a selector can wait for.

SIGHUP comes from operators, who ask for a restart, and from a terminal that is closed, which ends the process as
it ends others. A process that was started with SIGHUP ignored (`nohup`) outlives its terminal.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT)
RESTART = signal.SIGHUP
_OUTLIVES_TERMINAL = signal.getsignal(RESTART) is signal.SIG_IGN  # at the start: handlers are set later
MORE, FEWER = signal.SIGTTIN, signal.SIGTTOU  # one engine


@contextlib.contextmanager
def wakeups(arrived: list[int]) -> Iterator[int]:
    """Yields a descriptor that becomes readable at the signals above and SIGCHLD. Signals are appended to `arrived`."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    ends_with_terminal = _has_terminal() and not _OUTLIVES_TERMINAL

    def note(number: int, _: FrameType | None) -> None:
        is_hung_up = number == RESTART and ends_with_terminal and not _has_terminal()
        arrived.append(STOP[0] if is_hung_up else number)

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


def _has_terminal() -> bool:
    """Whether this process has a terminal that can send it signals."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
