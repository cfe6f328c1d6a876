"""Holds back requests whose grammar is being compiled, in front of the engine stage; other requests pass.

Compiling runs on threads. Messages of a waiting request wait with it, in order. A grammar is kept while its request is
open, so that the engine need not compile it during a step.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.sampling.grammars import Grammar, Grammars
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.engine.stage import Emit, EngineStage
from sluice_server.services.faults import fault
from sluice_server.services.messages.messages import Cancel, Message, OfNoRequest, OpenSerials, Prompt, failed
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import about

WORTHWHILE_BYTES = 16 << 20  # returning heap memory takes some milliseconds, so it is done for no less


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its grammar, and the messages that arrived after it."""

    prompt: Prompt
    came: float
    future: "Future[Grammar]"
    behind: list[Message] = dataclasses.field(default_factory=list)


class GrammarGate:
    """A stage that wraps the engine stage."""

    def __init__(
        self, stage: EngineStage, grammars: Grammars, executor: Executor, wake: Callable[[], None], emit: Emit
    ) -> None:
        """`wake` schedules a turn; the executor's threads call it."""
        self._stage = stage
        self._grammars = grammars
        self._executor = executor
        self._wake = wake
        self._emit = emit
        self._waiting: dict[str, _Waiting] = {}
        self._compiled: deque[_Waiting] = deque()
        self._kept: dict[str, Grammar] = {}
        self._dropped_bytes = 0  # of dropped grammars; the C library may not have returned them yet

    @property
    def progress(self) -> int:
        """The engine stage's progress."""
        return self._stage.progress

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for their grammar."""
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """The number of open requests with a grammar."""
        return len(self._kept)

    def handle(self, message: Message) -> None:
        """Holds back requests that need a grammar, and messages about them; passes all others to the engine stage."""
        if isinstance(message, OpenSerials):
            for name in [one for one, it in self._waiting.items() if message.has_ended(it.prompt.envelope)]:
                self._drop(name)
        if isinstance(message, OfNoRequest):
            self._stage.handle(message)
            return
        envelope = message.envelope
        waiting = self._waiting.get(envelope.request_id)
        if waiting is not None and envelope.attempt < waiting.prompt.envelope.attempt:
            return  # of an earlier attempt
        match message:
            case Prompt():
                if waiting is None or envelope.attempt > waiting.prompt.envelope.attempt:
                    self._drop(envelope.request_id)
                    self._take(message)
            case Cancel(output_index=None):
                self._drop(envelope.request_id)
                self._stage.handle(message)
            case _ if waiting is not None:
                waiting.behind.append(message)
            case _:
                self._stage.handle(message)

    def turn(self) -> bool:
        """Admits requests whose grammar is compiled, then runs a turn of the engine stage."""
        while self._compiled:
            waiting = self._compiled.popleft()
            if self._waiting.get(waiting.prompt.envelope.request_id) is waiting:
                self._let_in(waiting)
        if self._kept:
            self._kept = {name: grammar for name, grammar in self._kept.items() if self._stage.is_open(name)}
        return self._stage.turn()

    def reap(self) -> None:
        """Reaps the engine stage; waiting requests are reaped after their admission.

        While no request has a grammar, returns the memory of dropped grammars to the operating system.
        """
        self._stage.reap()
        if not self._waiting and not self._kept:
            self._dropped_bytes += self._grammars.take_dropped_bytes()
            if self._dropped_bytes >= WORTHWHILE_BYTES:
                self._dropped_bytes = 0
                give_back()

    def _take(self, prompt: Prompt) -> None:
        source = prompt.params.grammar
        grammar = self._grammars.compiled(source) if source else None
        if grammar is not None:
            self._kept[prompt.envelope.request_id] = grammar
        if grammar is not None or not source:
            self._stage.handle(prompt)
            return
        future = self._executor.submit(self._grammars.compile, source)
        waiting = _Waiting(prompt, time.monotonic(), future)
        self._waiting[prompt.envelope.request_id] = waiting
        future.add_done_callback(lambda _: self._done(waiting))

    def _done(self, waiting: _Waiting) -> None:
        """Marks a compilation as done, on its thread."""
        self._compiled.append(waiting)
        self._wake()

    def _let_in(self, waiting: _Waiting) -> None:
        """Passes a request and the messages behind it to the engine stage, or fails it if its grammar did not compile.

        An exception here must fail this request only.
        """
        envelope = waiting.prompt.envelope
        del self._waiting[envelope.request_id]
        try:
            self._kept[envelope.request_id] = waiting.future.result()
            if envelope.time_left_s is not None:
                left_s = envelope.time_left_s - (time.monotonic() - waiting.came)
                envelope = msgspec.structs.replace(envelope, time_left_s=left_s)
            self._stage.handle(msgspec.structs.replace(waiting.prompt, envelope=envelope))
            for message in waiting.behind:
                self._stage.handle(message)
        except ServiceError as error:
            self._emit(failed(envelope, error))
        except Exception as error:
            self._stage.handle(Cancel(envelope))  # the engine may have accepted part of it
            what = "failed while it compiled the grammar of this request and admitted it"
            self._emit(failed(envelope, fault(Role.ENGINE, about(envelope), what, error)))

    def _drop(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.future.cancel()
