"""How grpc's own threads share the processors with the loop that they serve. Knows nothing else."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def yielding_threads() -> Iterator[None]:
    """Threads that start in this block, and those that they start, push no other off its processor when they wake: they
    take one that is free, or wait for their turn (SCHED_BATCH; their share of the time stays the same). Turns of
    another length, as stages and engines have, would not do: see `services.process.slices`; they cost a fifth more.

    grpc's poller wakes at the end of every write, to say so to the loop, and took the loop's processor for that: 2.5
    switches a message, of the loop in the midst of its writes to other streams. This way it says so of many at once.
    Linux only; elsewhere, and where it is forbidden, nothing changes.
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
