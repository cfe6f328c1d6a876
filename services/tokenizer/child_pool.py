"""Runs jobs that may loop or exhaust memory in child processes, which can be killed at the cost of one job.

A child starts when it is first needed, and again after it was killed. It inherits no secrets of the environment and
ends with the thread that started it. One thread at a time uses a child. Setup and answers are structs of the caller;
`child_pipe` is the child's end of the pipe.
"""

import contextlib
import dataclasses
import fcntl
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from sluice_server.services.tokenizer.child_pipe import LENGTH_BYTES, ChildReady, Crashed, Unready

EXECUTABLE = sys.executable
INHERITED = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "TZ")
WALL_FACTOR = 10  # limit of wall-clock time, as a multiple of the limit of CPU time
TICK_S = 0.01  # shortest wait, so that the parent does not spin while a child gets no CPU time
CPU_CLOCK = 2  # Linux's clock type for the CPU time of a whole process

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTimeLimit:
    """The CPU time that a child may use, in seconds; CPU time, so that a busy machine causes no timeouts."""

    start_s: float = 5.0  # start of the interpreter, and the child's preparation
    job_s: float = 1.0


PATIENCE = CpuTimeLimit()


class ChildError(Exception):
    """A child returned no answer."""


class UnreadyError(ChildError):
    """The child cannot work with its setup."""


class OverdueError(ChildError):
    """The child did not answer in time; `limit_s` is its limit of CPU time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class CrashedError(ChildError):
    """The child raised an unexpected exception, which is a bug of this server; the message is its traceback."""


class UnstartedError(ChildError):
    """The child process could not be started."""


class DiedError(ChildError):
    """The child died during this job: out of memory, or of a deep recursion."""


class ChildPool(Generic[_Answer]):
    """A pool of at most `num` child processes. Thread-safe."""

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        decode: Callable[[bytes], _Answer],
        num: int = 1,
        patience: CpuTimeLimit = PATIENCE,
        pipe_bytes: int = 0,
    ) -> None:
        """Runs `module` in each child. `setup` is its first frame; `decode` reads its answers, raising MsgspecError.
        `pipe_bytes`: that a pipe of answers is to hold, where the system allows it; 0 for what pipes hold."""
        self._free: queue.LifoQueue[_Child[_Answer]] = queue.LifoQueue()  # LIFO: another child starts only when needed
        self._children = [_Child((EXECUTABLE, "-m", module), setup, decode, patience, pipe_bytes) for _ in range(num)]
        for child in self._children:
            self._free.put(child)

    def ask(self, job: msgspec.Struct) -> _Answer:
        """Returns a child's answer. Raises ChildError when there is none.

        After any error but CrashedError that child is dead.
        """
        child = self._free.get()
        try:
            return child.ask(job)
        finally:
            self._free.put(child)

    def close(self) -> None:
        """Ends the children. No job may be running."""
        for child in self._children:
            child.stop()


class _Child(Generic[_Answer]):
    """One child process, started on demand; used by one thread at a time."""

    def __init__(
        self,
        command: tuple[str, ...],
        setup: msgspec.Struct,
        decode: Callable[[bytes], _Answer],
        patience: CpuTimeLimit,
        pipe_bytes: int,
    ) -> None:
        self._command = command
        self._setup = setup
        self._decode = decode
        self._patience = patience
        self._pipe_bytes = pipe_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: msgspec.Struct) -> _Answer:
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died between two jobs, so neither job caused that
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
        """Kills the process, if there is one."""
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
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
                start_new_session=True,  # else its CPU time is counted as that of this process's session
            )
        except OSError as error:
            raise UnstartedError from error
        if self._pipe_bytes:
            _widen(process, self._pipe_bytes)
        answer = _exchange(process, self._setup, self._patience.start_s)
        if isinstance(msgspec.msgpack.decode(answer, type=ChildReady | Unready), ChildReady):
            return process
        self.stop()
        raise UnreadyError


def _widen(process: "subprocess.Popen[bytes]", num_bytes: int) -> None:
    """Has the pipe of answers hold so many bytes: both sides take turns for each 64 KiB of a long answer otherwise."""
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # more than a user may have
        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, num_bytes)


def _exchange(process: "subprocess.Popen[bytes]", request: msgspec.Struct, timeout_s: float) -> bytes:
    """Sends a frame and waits for one. Raises TimeoutError(timeout_s), or OSError when the process is dead."""
    assert process.stdin is not None and process.stdout is not None
    deadline = _Deadline(process.pid, timeout_s)
    body = msgspec.msgpack.encode(request)
    data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while data:  # the child reads the whole frame first, so the loop ends
        data = data[os.write(process.stdin.fileno(), data) :]
    source = process.stdout.fileno()
    head = _read(source, LENGTH_BYTES, deadline)
    reply = None if head is None else _read(source, int.from_bytes(head, "little"), deadline)
    if reply is None:
        raise TimeoutError(timeout_s)
    return reply


class _Deadline:
    """The time limit of one job, in the child's CPU time and in wall-clock time."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._clock = ~pid << 3 | CPU_CLOCK
        self._cpu_end = time.clock_gettime(self._clock) + limit_s
        self._wall_end = time.monotonic() + WALL_FACTOR * limit_s

    def left_s(self) -> float:
        """Returns the seconds to wait before the next check; 0 at the limit. Raises OSError if the process is gone."""
        left = min(self._cpu_end - time.clock_gettime(self._clock), self._wall_end - time.monotonic())
        return max(left, TICK_S) if left > 0 else 0.0


def _read(source: int, size: int, deadline: _Deadline) -> bytes | None:
    """Reads exactly `size` bytes; returns None when the time limit is reached. Raises OSError when the pipe ends."""
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
