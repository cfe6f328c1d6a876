"""Scheduling of gRPC core's threads and of the gateway's own, relative to the event loop."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def yielding_threads() -> Iterator[None]:
    """Keeps threads that start in this block from preempting others when they wake (SCHED_BATCH).

    The same holds for threads that those start. They take a free processor or wait for one; their share of time stays
    the same. Other time slices, as stages and engines have, would cost a fifth more: see `engine.worker.host.slices`.

    gRPC's poller wakes at the end of every write to notify the event loop, and preempted it: 2.5 switches per message,
    in the middle of the loop's writes to other streams. With SCHED_BATCH it notifies of many writes at once. Linux
    only; elsewhere, and where it is forbidden, nothing changes.
    """
    if sys.platform != "linux":
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, policy, param)


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
