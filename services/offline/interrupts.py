"""^C at a time when everything is whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A ^C that comes within is heard at the end, by whoever hears it otherwise; a second one at once."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    hears = before
    came: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            hears(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(came) == 1:
        hears(signal.SIGINT, came[0])
