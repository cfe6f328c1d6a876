"""A child process's end of the pipe to its parent (see `killable`): frames on stdin and stdout, and its confinement.

A frame is a length of four bytes, little-endian, then msgpack. The first tells the child what it works with; it answers
Ready or Unready, then each job with its answer, or with Crashed.
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


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Jobs may come."""


class Unready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """None can be done with what was told."""


class Crashed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """In place of an answer: a fault of ours."""

    trace: str


def serve(
    kind: type[_Job], answer: Callable[[_Job], msgspec.Struct], settle: Callable[[], object] = lambda: None
) -> None:
    """Answer jobs until the parent has gone; `settle` is called behind each answer."""
    while (job := receive(kind)) is not None:
        try:
            answered = answer(job)
        except (MemoryError, RecursionError):
            raise  # this job was too much: its parent sees that this process is gone
        except Exception:
            answered = Crashed(traceback.format_exc())
        send(answered)
        del job, answered
        settle()


def begin() -> None:
    """Die with the parent; leave ^C to the supervisor."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def confine(memory_bytes: int) -> None:
    """Use only so much address space from now on."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def receive(kind: type[_T]) -> _T | None:
    """The next frame; None when the parent has gone."""
    head = _read(LENGTH_BYTES)
    return None if head is None else msgspec.msgpack.decode(_read(int.from_bytes(head, "little")) or b"", type=kind)


def send(answer: msgspec.Struct) -> None:
    """Write a frame."""
    body = msgspec.msgpack.encode(answer)
    data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while data:
        data = data[os.write(1, data) :]


def _read(size: int) -> bytes | None:
    """Exactly so many bytes of stdin; None at its end."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
