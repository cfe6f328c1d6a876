"""Does what a start takes at a low priority, where models serve meanwhile that must lose little.

Linux has a priority for each thread, and without privileges one may lower its own but not raise it again. So a thread
of low priority does such work, and ends; the thread that waits for it keeps its priority, and so do the threads that
last: they are begun by it, before or behind that work. Where no other work waits for a processor a low priority costs
nothing; beside threads that never sleep, such work gets a tenth of a processor.

A share is given in turns, and a turn could be as long as a step of a small model. So such a thread has the longest time
slice as well, which any other one that wakes interrupts.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from sluice_server.engine.worker.host.slices import LONGEST_S, take_turns_of

ASIDE = "SLUICE_ASIDE"  # set by a supervisor for a process that starts beside models that serve
NICE = 10  # a tenth of the share of an ordinary thread
Found = TypeVar("Found")


def call_aside(call: Callable[[], Found]) -> Found:
    """Returns what `call` returns, or raises what it raises; on a thread of low priority, which ends, if this process
    starts beside models that serve."""
    if ASIDE not in os.environ:
        return call()
    from concurrent.futures import ThreadPoolExecutor  # the command line does without

    with ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=lower_aside) as thread:
        return thread.submit(call).result()


def lower_aside() -> None:
    """Lowers the priority of this thread, and of those that it starts, and lets others interrupt it, if this process
    starts beside models that serve. What the system refuses is left as it is."""
    if ASIDE in os.environ:
        lower(threading.get_native_id())
        take_turns_of(LONGEST_S)


def lower(process: int) -> None:
    """Lowers the priority of a process or thread, if the system lets it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, max(NICE, os.getpriority(os.PRIO_PROCESS, process)))
