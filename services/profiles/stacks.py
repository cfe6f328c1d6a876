"""Samples the call stacks of all Python threads of this process from a thread of its own, a hundred times a second.

In the process itself: nothing attaches to it, so that it works in containers without ptrace. Time spent in C++ counts
for the Python function that called it, if that gives up the interpreter's lock, or returns within a sample.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

from sluice_server.services.profiles.speedscope import Frame, SampledProfile, Stack, document
from sluice_server.version import VERSION

INTERVAL_S = 0.01
MAX_DEPTH = 128  # innermost calls of a stack
MAX_THREADS = 64  # and the main thread in any case

_Raw = tuple[tuple[CodeType, int], ...]  # code and line, the innermost call first


class StackSampler:
    """A recorder of stacks; see `profiles.recording.Recorder`."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: of the profile, as the viewer shows it."""
        self._name = name
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stack sampler", daemon=True)
        self._seen: dict[int, list[tuple[_Raw, float]]] = {}  # by thread: stacks in order, and their seconds

    def start(self) -> None:
        """Starts the thread that samples."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; may be called again."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def encoded(self) -> bytes:
        """Returns the document, with a profile for each thread, the main thread first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        profiles = [
            SampledProfile(
                names.get(ident, f"thread {ident}"),
                "seconds",
                [_stack(raw) for raw, _ in seen],
                [seconds for _, seconds in seen],
            )
            for ident, seen in sorted(self._seen.items(), key=lambda one: one[0] != main)
        ]
        return document(self._name, profiles, f"sluice {VERSION}")

    def _sample(self) -> None:
        own, main, last_s = threading.get_ident(), threading.main_thread().ident, self._clock()
        while not self._ended.wait(INTERVAL_S):
            now_s = self._clock()
            for ident, frame in sys._current_frames().items():
                is_taken = ident in self._seen or ident == main or len(self._seen) < MAX_THREADS
                if ident != own and is_taken:
                    self._note(ident, _raw(frame), now_s - last_s)
            last_s = now_s

    def _note(self, ident: int, stack: _Raw, seconds: float) -> None:
        """Adds a sample; one that equals the thread's last one makes that longer, so that idle threads cost nothing."""
        seen = self._seen.setdefault(ident, [])
        if seen and seen[-1][0] == stack:
            seconds += seen.pop()[1]
        seen.append((stack, seconds))


def _raw(frame: FrameType | None) -> _Raw:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _stack(raw: _Raw) -> Stack:
    return tuple(Frame(code.co_qualname, code.co_filename, line) for code, line in reversed(raw))
