"""What links a process to its supervisor: the line by which it says that it serves, and its end with it."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

SUPERVISOR_PID = "SLUICE_SUPERVISOR_PID"  # set by a supervisor; this process must end when it ends
READY_FD = "SLUICE_READY_FD"  # number of an inherited pipe's file, which gets a line whenever this process serves again
GROUP_EPOCH = "SLUICE_GROUP_EPOCH"  # set by a supervisor: the number of this start of a group of ranks
TEMPLATE = "SLUICE_TEMPLATE"  # set by a supervisor for a template: the number of its socket
TEMPLATE_KIND = "SLUICE_TEMPLATE_KIND"  # and what it forks
ENGINES = "engines"  # how a gateway's line about engines begins
LANES = "lanes"  # and its line about models
CACHE = "cache"  # and an engine's about its cache
TEMPLATES = "template"  # and a template's when it can fork
TABLE_CHANGED = signal.SIGURG  # sent to gateways: the table of models is a new one; ignored where it is not handled
PR_SET_PDEATHSIG = 1


def say_ready(process_id: str, ready: str) -> bool:
    """Tell the supervisor that this process serves. Returns False if there is none."""
    if READY_FD not in os.environ:
        return False
    os.write(int(os.environ[READY_FD]), f"ready {process_id} {ready}\n".encode())
    return True


def say_engines(process_id: str, serving: Iterable[str], drained: Iterable[str]) -> None:
    """Tell the supervisor, if there is one, which engines serve, and which have no request left."""
    if READY_FD in os.environ:
        line = f"{ENGINES} {process_id} {','.join(sorted(serving))};{','.join(sorted(drained))}\n"
        os.write(int(os.environ[READY_FD]), line.encode())


def say_lanes(process_id: str, *lanes: Iterable[str]) -> None:
    """Tell the supervisor, if there is one, which lanes serve, which of those that leave have nothing open, which have
    something open, and for which requests wait; see `LaneReports.heard`."""
    if READY_FD in os.environ:
        told = ";".join(",".join(sorted(names)) for names in lanes)
        os.write(int(os.environ[READY_FD]), f"{LANES} {process_id} {told}\n".encode())


def say_cache(process_id: str, *, is_empty: bool) -> None:
    """Tell the supervisor, if there is one, whether this engine's cache is empty and its memory given back."""
    if READY_FD in os.environ:
        os.write(int(os.environ[READY_FD]), f"{CACHE} {process_id} {int(is_empty)}\n".encode())


def say_template(kind: str) -> None:
    """Tell the supervisor, once, that a template of this kind can fork: what it forks has a file of its own for that,
    or none."""
    file = int(os.environ.pop(READY_FD))
    os.write(file, f"{TEMPLATES} {kind} ready\n".encode())
    os.close(file)


def die_with_supervisor() -> None:
    """Let the kernel kill this process when its supervisor dies; exit now if it is dead already."""
    if SUPERVISOR_PID not in os.environ:
        return
    die_with(int(os.environ[SUPERVISOR_PID]))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; exit now if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def leave(status: int) -> NoReturn:
    """Ends this process with that exit status, once what is registered for its end is done.

    Its objects are not taken apart, as the interpreter does by itself: in a process that was forked the memory of each
    is copied before, and the end of an engine took twice the processor time of its start, beside models that serve.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(status)
