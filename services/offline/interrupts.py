"""Delays SIGINT until the state is consistent."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays a SIGINT to the end of the block, and then calls the usual handler; a second SIGINT is handled at once.

    Does nothing outside the main thread, or without a Python handler.
    """
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
