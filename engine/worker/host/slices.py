"""Time slices: sets how long a thread runs at a time, so that stages get a processor at once when they wake.

The stages share their processors with the engine's threads, which never sleep while there is work. From 6.12 on Linux
lets a thread set its slice (`sched_runtime` of sched_setattr(2)). A waking thread preempts one with a longer slice if
it has had less than its share lately. Otherwise it waits for the end of that slice, a millisecond or more. Shares do
not change.
"""

import ctypes
import os
import platform
import sys

SHORT_S = 0.0001  # the least that Linux accepts; a stage needs little more for a message
LONGEST_S = 0.1  # the most that Linux accepts, for work that all else may interrupt
LONG_S = 0.01  # longer than the default of 0.7 to 2.8 ms, which other programs on the machine have, clients included
CALLS = {
    "x86_64": (314, 315),
    "aarch64": (274, 275),
}  # numbers of sched_setattr(2) and sched_getattr(2), for which the C library has no functions


class Attributes(ctypes.Structure):
    """struct sched_attr in its first version."""

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
    """Set the slice of this thread, and of threads and processes that it starts later. Returns False, without a
    change, if the system does not support or allow it, or the thread's policy is not SCHED_OTHER."""
    calls = CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice, wanted_ns = os.getpriority(os.PRIO_PROCESS, 0), round(seconds * 1e9)
    wanted = Attributes(SIZE, os.SCHED_OTHER, 0, nice, 0, wanted_ns, 0, 0)
    ctypes.CDLL(None).syscall(calls[0], 0, ctypes.byref(wanted), 0)
    return round(turns_s() * 1e9) == wanted_ns  # an older system accepts the number and ignores it


def turns_s() -> float:
    """Returns this thread's slice in seconds; 0 if the system does not report it."""
    calls = CALLS.get(platform.machine())
    found = Attributes()
    if sys.platform == "linux" and calls is not None:
        ctypes.CDLL(None).syscall(calls[1], 0, ctypes.byref(found), SIZE, 0)
    return float(found.runtime_ns) / 1e9
