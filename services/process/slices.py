"""For how long at a time a process wants a processor: whoever wants it for less gets it at once when it wakes.

The stages share their processors with the engine's threads, which never rest while there is work. From 6.12 on Linux
lets a thread say how long its turns are (`sched_runtime` of sched_setattr(2)); one that wakes then takes the processor
from another with longer turns, if it has had less than its share of late, and does not wait for the end of that turn,
which lasts a millisecond or more. Shares stay what they are. Knows nothing of what a process does.
"""

import ctypes
import os
import platform
import sys

SHORT_S = 0.0001  # the least that Linux takes: a stage needs little more for a message
LONG_S = 0.01  # more than the 0.7 to 2.8 ms of those who ask for nothing, clients on the same machine among them
CALLS = {
    "x86_64": (314, 315),
    "aarch64": (274, 275),
}  # sched_setattr(2) and sched_getattr(2): the C library has neither


class Attributes(ctypes.Structure):
    """struct sched_attr in its first form."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


SIZE = ctypes.sizeof(Attributes)


def take_turns_of(seconds: float) -> bool:
    """Make turns of this thread, and of threads and processes that it starts from now on, so long. False where the
    system has no such thing, or forbids it, or the thread's policy is not the usual one: nothing changes then."""
    calls = CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice, wanted_ns = os.getpriority(os.PRIO_PROCESS, 0), round(seconds * 1e9)
    wanted = Attributes(SIZE, os.SCHED_OTHER, 0, nice, 0, wanted_ns, 0, 0)
    ctypes.CDLL(None).syscall(calls[0], 0, ctypes.byref(wanted), 0)
    return round(turns_s() * 1e9) == wanted_ns  # an older system takes the number and forgets it


def turns_s() -> float:
    """How long this thread's turns are; 0 where the system does not tell."""
    calls = CALLS.get(platform.machine())
    found = Attributes()
    if sys.platform == "linux" and calls is not None:
        ctypes.CDLL(None).syscall(calls[1], 0, ctypes.byref(found), SIZE, 0)
    return float(found.runtime_ns) / 1e9
