"""Scheduling of gRPC core's threads and of the gateway's own, relative to the event loop."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

NICENESS = 10  # of Python threads that yield: a tenth of the weight of others


@contextlib.contextmanager
def yielding_threads() -> Iterator[None]:
    """Keeps threads that start in this block from preempting others when they wake (SCHED_BATCH; Python's own have a
    low priority, too).

    The policy is also that of threads that those start. They take a free processor or wait for one. Other time slices,
    as stages and engines have, would cost a fifth more: see `engine.worker.host.slices`.

    gRPC's poller, a thread of Python, wakes at the end of every write to notify the event loop, and preempted it: 2.5
    switches per message, in the middle of the loop's writes to other streams. With SCHED_BATCH it should notify of many
    writes at once, but Linux 6.18 still lets it preempt, up to 1.5 times per message, as long as it has had less than
    its share. At a low priority a notification uses up that share; what is left, a tenth of the loop's time, is more
    than the poller needs: 3 µs of the 50 of a message. Linux only; elsewhere, and where it is forbidden, nothing
    changes.
    """
    if sys.platform != "linux":
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    before = set(threading.enumerate())
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, policy, param)
        for thread in set(threading.enumerate()) - before:
            _make_nice(thread)


def _make_nice(thread: threading.Thread) -> None:
    """Lowers the priority of a thread; one that has ended already has none."""
    if thread.native_id is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, NICENESS)


TURN_S, USUAL_S = 0.0001, 0.005  # seconds that a thread keeps the interpreter while another one waits for it


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Lets threads take the interpreter from each other sooner than Python does by itself.

    A thread gives the interpreter up for every system call, and beside a busy loop it waited 5 ms to get it back: to
    look at sixty open files took more than a second.
    """
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(USUAL_S)
