"""Runs a child process's end of the pipe to its parent (see `child_pool`): frames on stdin and stdout, resource limits.

A frame is a length of four bytes, little-endian, then msgpack. The first frame is the child's setup, which it answers
with Ready or Unready. It then answers each job, or sends Crashed.
"""

import ctypes
import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

LENGTH_BYTES = 4
PR_SET_PDEATHSIG = 1

_Job = TypeVar("_Job")
_T = TypeVar("_T")


class ChildReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The child accepts jobs."""


class Unready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The child cannot work with its setup."""


class Crashed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An unexpected exception of the child, in place of an answer."""

    trace: str


def serve(
    kind: type[_Job], answer: Callable[[_Job], msgspec.Struct], settle: Callable[[], object] = lambda: None
) -> None:
    """Answers jobs until the parent closes the pipe; calls `settle` after each answer."""
    while (job := receive(kind)) is not None:
        try:
            answered = answer(job)
        except (MemoryError, RecursionError):
            raise  # the job exceeded a limit: the process ends, and its parent reports that
        except Exception:
            answered = Crashed(traceback.format_exc())
        send(answered)
        del job, answered
        settle()


def begin() -> None:
    """Makes the process end with its parent, and ignores SIGINT, which the supervisor handles."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def confine(memory_bytes: int) -> None:
    """Limits the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def receive(kind: type[_T]) -> _T | None:
    """Reads the next frame; returns None when the parent has closed the pipe."""
    head = _read(LENGTH_BYTES)
    return None if head is None else msgspec.msgpack.decode(_read(int.from_bytes(head, "little")) or b"", type=kind)


def send(answer: msgspec.Struct) -> None:
    """Writes a frame."""
    body = msgspec.msgpack.encode(answer)
    data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while data:
        data = data[os.write(1, data) :]


def _read(size: int) -> bytes | None:
    """Reads exactly `size` bytes from stdin; returns None at its end."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
