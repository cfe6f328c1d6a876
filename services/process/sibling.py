"""Forks a sibling of this process: a copy of it whose parent is the parent of this process.

A fork of a fork whose first process exits has another parent, too, but copies the tables of this process's memory
twice and takes them apart once: three times the processor time, for a template of engines 15 ms beside models that
serve.
"""

import ctypes
import os
import platform
import sys
import threading

CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_GET_TID_ADDRESS = 40
CALLS = {"x86_64": 56, "aarch64": 220}  # numbers of clone(2), which the C library cannot call without a stack


def fork_sibling() -> int:
    """Returns 0 in the copy, and its number here, as `os.fork` does. This process must have one thread, and its parent
    must live. Raises OSError.

    Beside what Python does around a fork, the copy needs the number of its thread where the C library keeps it. Of what
    `fork` does else, locks and other threads' stacks need nothing in a process with one thread; handlers that a library
    of C registered for a fork are not called.
    """
    at = _thread_number_at()
    python, library = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # neither lets go of the interpreter's lock
    library.syscall.restype = ctypes.c_long
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID  # it ends with the signal that this one ends with
    # One processor has the address as the fourth word, another one as the fifth; what is no address there is not read.
    words = [ctypes.c_long(word) for word in (CALLS[platform.machine()], flags, 0, 0, at, at)]
    python.PyOS_BeforeFork()
    pid = int(library.syscall(*words))
    if not pid:
        python.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def can_fork_siblings() -> bool:
    """Whether this system has what `fork_sibling` needs: a sandbox or another C library may lack it."""
    try:
        return bool(_thread_number_at())
    except OSError:
        return False


def _thread_number_at() -> int:
    """Returns the address at which the C library keeps the number of this thread. Raises OSError."""
    if sys.platform != "linux" or platform.machine() not in CALLS:
        raise OSError(0, "siblings are forked on Linux only, on x86-64 and on ARM")
    at = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(PR_GET_TID_ADDRESS, ctypes.byref(at), 0, 0, 0)
    if failed or not at.value or ctypes.c_int.from_address(at.value).value != threading.get_native_id():
        raise OSError(0, "the system does not say where the number of a thread is")
    return at.value
