"""A child process that does jobs which may loop or fill memory: it can be killed, and costs only the job that did it.

A child is made when it is first needed and again after it was killed; it inherits no secret of the environment, and
dies with the thread that made it. Each is used by one thread at a time. Knows no job's meaning: what children are told
first and what they answer are the caller's structs (see `child_pipe` for their end).
"""

import dataclasses
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from sluice_server.services.tokenizer.child_pipe import LENGTH_BYTES, Crashed, Ready, Unready

EXECUTABLE = sys.executable
INHERITED = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "TZ")
WALL_FACTOR = 10  # so many times its CPU time a child may take by the wall clock
TICK_S = 0.01  # shortest wait: a child that is held up must not make its parent spin
CPU_CLOCK = 2  # Linux's number of a process's whole CPU time

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTimeLimit:
    """How long a child may compute, in seconds of its own CPU time: on a busy machine nobody is refused for waiting."""

    start_s: float = 5.0  # an interpreter's start, and what it prepares
    job_s: float = 1.0


PATIENCE = CpuTimeLimit()


class ChildError(Exception):
    """A child gave no answer."""


class UnreadyError(ChildError):
    """It cannot work with what it was told first."""


class OverdueError(ChildError):
    """It did not answer in time; `limit_s` is the CPU time that it had."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class CrashedError(ChildError):
    """It raised what it should not, which is a fault of ours; the text is its traceback."""


class UnstartedError(ChildError):
    """No process could be started."""


class DiedError(ChildError):
    """It died at this job: of memory, or of a deep recursion."""


class ChildPool(Generic[_Answer]):
    """As many children as work at once, at most `num`. Thread-safe."""

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        decode: Callable[[bytes], _Answer],
        num: int = 1,
        patience: CpuTimeLimit = PATIENCE,
    ) -> None:
        """`module` is run; it is told `setup` first, and `decode` reads its answers (raising MsgspecError)."""
        self._free: queue.LifoQueue[_Child[_Answer]] = queue.LifoQueue()  # last used first: others start when needed
        self._children = [_Child((EXECUTABLE, "-m", module), setup, decode, patience) for _ in range(num)]
        for child in self._children:
            self._free.put(child)

    def ask(self, job: msgspec.Struct) -> _Answer:
        """A child's answer. Raises ChildError when there is none; unless it crashed, that child is dead then."""
        child = self._free.get()
        try:
            return child.ask(job)
        finally:
            self._free.put(child)

    def close(self) -> None:
        """End the children. No job may be under way."""
        for child in self._children:
            child.stop()


class _Child(Generic[_Answer]):
    """One process, living or not; used by one thread at a time."""

    def __init__(
        self,
        command: tuple[str, ...],
        setup: msgspec.Struct,
        decode: Callable[[bytes], _Answer],
        patience: CpuTimeLimit,
    ) -> None:
        self._command = command
        self._setup = setup
        self._decode = decode
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: msgspec.Struct) -> _Answer:
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died between two jobs, which is the fault of neither
        try:
            process = self._process or self._start()
            return self._decoded(_exchange(process, job, self._patience.job_s))
        except TimeoutError as error:
            self.stop()
            raise OverdueError(*error.args) from error
        except (OSError, msgspec.MsgspecError) as error:
            self.stop()
            raise DiedError from error

    def _decoded(self, reply: bytes) -> _Answer:
        try:
            return self._decode(reply)
        except msgspec.MsgspecError:
            crashed = msgspec.msgpack.decode(reply, type=Crashed)
            raise CrashedError(crashed.trace) from None

    def stop(self) -> None:
        """Kill it, if it lives."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name in INHERITED}
        try:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
        except OSError as error:
            raise UnstartedError from error
        answer = _exchange(process, self._setup, self._patience.start_s)
        if isinstance(msgspec.msgpack.decode(answer, type=Ready | Unready), Ready):
            return process
        self.stop()
        raise UnreadyError


def _exchange(process: "subprocess.Popen[bytes]", request: msgspec.Struct, timeout_s: float) -> bytes:
    """Send a frame, wait for one. Raises TimeoutError(timeout_s), OSError (it is dead)."""
    assert process.stdin is not None and process.stdout is not None
    deadline = _Deadline(process.pid, timeout_s)
    body = msgspec.msgpack.encode(request)
    data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while data:  # it reads before it does anything else, so this ends
        data = data[os.write(process.stdin.fileno(), data) :]
    source = process.stdout.fileno()
    head = _read(source, LENGTH_BYTES, deadline)
    reply = None if head is None else _read(source, int.from_bytes(head, "little"), deadline)
    if reply is None:
        raise TimeoutError(timeout_s)
    return reply


class _Deadline:
    """The end of a process's patience, by its own CPU time."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._clock = ~pid << 3 | CPU_CLOCK
        self._cpu_end = time.clock_gettime(self._clock) + limit_s
        self._wall_end = time.monotonic() + WALL_FACTOR * limit_s

    def left_s(self) -> float:
        """How long to wait before asking again; 0 when it is over. Raises OSError when the process is gone."""
        left = min(self._cpu_end - time.clock_gettime(self._clock), self._wall_end - time.monotonic())
        return max(left, TICK_S) if left > 0 else 0.0


def _read(source: int, size: int, deadline: _Deadline) -> bytes | None:
    """Exactly so many bytes; None when they do not come in time. Raises OSError at the end of the pipe."""
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while len(data) < size:
            left_s = deadline.left_s()
            if not selector.select(left_s):
                if not left_s:
                    return None
                continue
            piece = os.read(source, size - len(data))
            if not piece:
                raise BrokenPipeError
            data += piece
    return bytes(data)
