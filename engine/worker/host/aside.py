"""Does what a start takes at a low priority, where models serve meanwhile that must lose little.

Linux has a priority for each thread, and without privileges one may lower its own but not raise it again. So a thread
of low priority does such work, and ends; the thread that waits for it keeps its priority, and so do the threads that
last: they are begun by it, before or behind that work. Where no other work waits for a processor a low priority costs
nothing; beside threads that never sleep, such work gets a tenth of a processor.

A share is given in turns, and a turn lasts until the system's next tick, which may be as long as a step of a small
model: with a tenth a step waits eight times while a small model is loaded. So work begins at the lowest priority, with
a seventieth of a processor beside threads that never sleep, and goes on so where it gets a tenth all the same, since
processors have time left. Such a thread has the longest time slice as well, which any other one that wakes interrupts.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sluice_server.engine.worker.host.slices import LONGEST_S, take_turns_of

ASIDE = "SLUICE_ASIDE"  # set by a supervisor for a process that starts beside models that serve
STARVED = "starved"  # its value once the lowest priority was too low
NICE = 10  # a tenth of the share of an ordinary thread
LOWEST = 19  # a seventieth
LEAST_SHARE = 0.1  # of a processor, below which work has starved
BRIEF_S = 0.02  # work that takes no longer says nothing about its share
Found = TypeVar("Found")


def call_aside(call: Callable[[], Found]) -> Found:
    """Returns what `call` returns, or raises what it raises; on a thread of low priority, which ends, if this process
    starts beside models that serve."""
    if ASIDE not in os.environ:
        return call()
    from concurrent.futures import ThreadPoolExecutor  # the command line does without

    nice = NICE if os.environ[ASIDE] == STARVED else LOWEST
    with ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=functools.partial(lower_aside, nice)) as thread:
        return thread.submit(_watched, call).result()


def _watched(call: Callable[[], Found]) -> Found:
    """Returns what `call` returns; has what follows it done at a higher priority if this thread has starved."""
    start_s, used_s = time.monotonic(), time.thread_time()
    try:
        return call()
    finally:
        took_s = time.monotonic() - start_s
        if took_s > BRIEF_S and time.thread_time() - used_s < LEAST_SHARE * took_s:
            os.environ[ASIDE] = STARVED


def lower_aside(nice: int = NICE) -> None:
    """Lowers the priority of this thread, and of those that it starts, and lets others interrupt it, if this process
    starts beside models that serve. What the system refuses is left as it is."""
    if ASIDE in os.environ:
        lower(threading.get_native_id(), nice)
        take_turns_of(LONGEST_S)


def lower(process: int, nice: int = NICE) -> None:
    """Lowers the priority of a process or thread, if the system lets it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, max(nice, os.getpriority(os.PRIO_PROCESS, process)))
