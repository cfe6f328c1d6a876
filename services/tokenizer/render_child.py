"""The process that renders chat templates, one after another, until its input ends. Its parent bounds its time.

It holds no secret, no socket and no file, and may use only so much memory. The only process in which templates run.
"""

import ctypes
import os
import resource
import signal
from typing import TypeVar

import msgspec

from services.tokenizer.render_frames import LENGTH_BYTES, Answer, Broken, Job, Refused, Rendered, Setup, TooLong
from services.tokenizer.template import FAULTS, RefusedError, Template, TooLongError

PR_SET_PDEATHSIG = 1

_T = TypeVar("_T")


def main() -> None:
    """Serve the parent at the other end of stdin and stdout."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the supervisor's to answer
    setup = _receive(Setup)
    if setup is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        default = Template(setup.default, setup.special_tokens)
        tool_use = Template(setup.tool_use, setup.special_tokens) if setup.tool_use else default
    except (*FAULTS, MemoryError):
        _send(Broken())
        return
    _send(Rendered(""))
    while (job := _receive(Job)) is not None:
        _send(_answer(tool_use if job.prompt.tools else default, job))


def _answer(template: Template, job: Job) -> Answer:
    try:
        return Rendered(template.render(job.prompt, job.max_bytes))
    except RefusedError as error:
        return Refused(str(error))
    except (TooLongError, MemoryError):
        return TooLong()
    except FAULTS:
        return Broken()


def _receive(kind: type[_T]) -> _T | None:
    head = _read(LENGTH_BYTES)
    return None if head is None else msgspec.msgpack.decode(_read(int.from_bytes(head, "little")) or b"", type=kind)


def _read(size: int) -> bytes | None:
    """Exactly so many bytes of stdin; None at its end."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _send(answer: Answer) -> None:
    body = msgspec.msgpack.encode(answer)
    data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
