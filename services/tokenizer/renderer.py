"""Runs chat templates in child processes that can be killed: a template that loops or fills memory costs its request.

Takes prompts, gives text or a `ServiceError`. A child is made when it is first needed and again after it was killed; it
inherits no secret of the environment, and dies with the thread that made it. Thread-safe. Knows no template language.
"""

import dataclasses
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import assert_never

import msgspec

from engine.errors import Code, ServiceError, engine_fault, invalid
from services.tokenizer.render_frames import LENGTH_BYTES, Answer, Broken, Job, Refused, Rendered, Setup, TooLong
from services.work import ChatPrompt

MEMORY_BYTES = 512 << 20  # of address space; an idle child maps about 60 MiB
MAX_REFUSAL = 1024  # characters of a template's own words
INHERITED = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "TZ")
COMMAND = (sys.executable, "-m", "services.tokenizer.render_child")
FIELD = "prompt.chat"
WALL_FACTOR = 10  # so many times its CPU time a child may take by the wall clock
TICK_S = 0.01  # shortest wait: a child that is held up must not make its parent spin
CPU_CLOCK = 2  # Linux's number of a process's whole CPU time


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """How long a child may compute, in seconds of its own CPU time: on a busy machine nobody is refused for waiting."""

    start_s: float = 5.0  # an interpreter's start, and compiling the templates
    render_s: float = 1.0


PATIENCE = Patience()


class Renderers:
    """As many children as render at once, at most `num`."""

    def __init__(self, setup: Setup, num: int = 1, patience: Patience = PATIENCE) -> None:
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()  # last used first: a second one starts when needed
        self._children = [_Child(setup, patience) for _ in range(num)]
        for child in self._children:
            self._free.put(child)

    def render(self, prompt: ChatPrompt, max_bytes: int) -> str:
        """The prompt as text. Raises ServiceError INVALID_ARGUMENT: refused by the template, or over a limit."""
        child = self._free.get()
        try:
            answer = child.ask(Job(prompt, max_bytes))
        finally:
            self._free.put(child)
        match answer:
            case Rendered():
                return answer.text
            case Refused():
                raise invalid(FIELD, f"the model's chat template refuses: {answer.message[:MAX_REFUSAL]}")
            case TooLong():
                raise invalid(
                    FIELD,
                    f"the model's chat template writes more than {max_bytes} bytes for these messages",
                    limit=max_bytes,
                )
            case Broken():
                raise invalid(FIELD, "the model's chat template cannot render these messages")
            case _:
                assert_never(answer)

    def close(self) -> None:
        """End the children. No render may be under way."""
        for child in self._children:
            child.stop()


class _Child:
    """One process, living or not; used by one thread at a time."""

    def __init__(self, setup: Setup, patience: Patience) -> None:
        self._setup = setup
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job) -> Answer:
        """Its answer. Raises ServiceError when it does not come in time; the child is dead then."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died between two prompts, which is the fault of neither
        try:
            process = self._process or self._start()
            return _exchange(process, job, self._patience.render_s)
        except TimeoutError as error:
            self.stop()
            (limit,) = error.args
            message = f"the model's chat template did not end within {limit:g} s for these messages"
            raise invalid(FIELD, message, limit=limit) from error
        except (OSError, msgspec.MsgspecError) as error:  # it died: of memory, or of a deep recursion
            self.stop()
            raise invalid(FIELD, "the model's chat template cannot render these messages") from error

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
        """A child that has compiled the templates. Raises ServiceError MODEL_INVALID if they do not compile."""
        environment = {name: value for name, value in os.environ.items() if name in INHERITED}
        try:
            process = self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
        except OSError as error:
            raise engine_fault("no process could be started to render the chat template") from error
        if isinstance(_exchange(process, self._setup, self._patience.start_s), Rendered):
            return process
        self.stop()
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "MODEL_INVALID",
            "prompt.chat: the model's chat template cannot be compiled; send the prompt as text",
            field=FIELD,
        )


def _exchange(process: "subprocess.Popen[bytes]", request: Setup | Job, timeout_s: float) -> Answer:
    """Send a frame, wait for one. Raises TimeoutError, OSError (it is dead), MsgspecError."""
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
    answer: Answer = msgspec.msgpack.decode(reply, type=Answer)
    return answer


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


def setup_of(default: str, tool_use: str, special_tokens: Mapping[str, str]) -> Setup:
    """What a child is told first."""
    return Setup(default, tool_use, dict(special_tokens), MEMORY_BYTES)
