"""The stages of a service in one thread: what each emits the next one takes, in the order of the ring, without it.

Every stage is the service's own class, and so is who opens requests and takes what comes round. Knows no caller.
"""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator

from sluice_server.engine.errors import Code, ServiceError, engine_fault
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.grammar_gate import GrammarGate
from sluice_server.services.engine.stage import EngineStage, RingMembership
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Envelope, Failed, Grant, Message, Preempted, Result, Text
from sluice_server.services.offline.interrupts import held
from sluice_server.services.offline.loading import NAME, Loaded
from sluice_server.services.telemetry.observed import Unobserved
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.tokenizer.inline_executor import InlineExecutor
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage

Take = Callable[[Message], None]


class Pipeline:
    """`open` requests, `wait_encoded`, `turn` until they have ended, `close` them. For one thread at a time."""

    def __init__(self, loaded: Loaded) -> None:
        self.settings = loaded.gateway
        self.encoder = loaded.encoder
        self.engine = loaded.built.engine
        self._refusal: ServiceError | None = None  # what is said when nothing more can be asked of it
        self._mail: deque[tuple[Take, Message]] = deque()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # of the compilers' threads
        self._manager = RequestManager(
            loaded.gateway,
            lambda message: self._mail.append((self._tokenizer.handle, message)),
            Unobserved(),
            time.monotonic,
            Quotas(lambda tenant: TenantLimits(), 1),
        )
        self._manager.refusal = None
        self._tokenizer = TokenizerStage(
            loaded.encoder,
            loaded.constraints,
            loaded.gateway.limits,
            EncodingThreads(InlineExecutor(), self._calls.put),
            lambda message: self._mail.append((self._gate.handle, message)),
            _unrecorded,
        )
        built = loaded.built
        engine = EngineStage(built.engine, RingMembership(NAME, 0), self._to_detokenizer, _unrecorded, built.computing)
        self._gate = GrammarGate(engine, built.grammars, InlineExecutor(), lambda: None, self._to_detokenizer)
        self._detokenizer = DetokenizerStage(
            loaded.encoder, lambda message: self._mail.append((self._deliver, message)), _unrecorded
        )

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return self._manager.num_open

    def open(self, asked: TranslatedRequest, opened: list[OpenRequest]) -> None:
        """Open a request, add it to `opened`, and encode its prompt as far as that waits for nobody. What is wrong with
        it becomes its outcome."""
        with self._whole():  # a ^C comes when it is in the list: its owner can close it
            opened.append(self._manager.open(CallMetadata(NAME), asked, streams=False))
            self._manager.submit(opened[-1])
            self._pass_on()

    def wait_encoded(self) -> None:
        """Wait for constraints that are being compiled."""
        while self._tokenizer.num_encoding:
            call = self._calls.get()  # ^C is heard here
            with self._whole():
                call()
                self._pass_on()

    def turn(self) -> None:
        """One step of the engine, and what it brought goes on to its requests."""
        with self._whole():
            again = self._gate.turn()
            self._pass_on()
            self._detokenizer.turn()
            self._pass_on()
            if not again and not self._gate.num_waiting and self._is_stuck():
                raise engine_fault("the engine has no work, and requests are open")

    def close(self, *requests: OpenRequest) -> None:
        """Let go of requests, ended or not: nothing more is computed for them."""
        if self._refusal is not None:
            return
        with self._whole():
            for request in requests:
                self._manager.close(request)
            self._pass_on()

    def shut(self) -> None:
        """Let go of every request, and take none any more."""
        self._manager.fail_all(closed())
        self.close(*self._manager.requests)
        self._refusal = closed()
        del self.engine, self._tokenizer, self._gate, self._detokenizer  # a stream that was left may refer to this

    def _is_stuck(self) -> bool:
        return not self._tokenizer.num_encoding and any(one.outcome is None for one in self._manager.requests)

    def _pass_on(self) -> None:
        while self._mail:
            take, message = self._mail.popleft()
            take(message)

    def _to_detokenizer(self, message: Message) -> None:
        self._mail.append((self._detokenizer.handle, message))

    def _deliver(self, message: Message) -> None:
        """What comes round; nobody asks for the engine's load."""
        if isinstance(message, Text | Failed | Result | Preempted):
            self._manager.handle(message)
        elif isinstance(message, Grant):
            self._manager.take_back(message)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What happens within happens as a whole: whatever breaks it off leaves stages that nothing more is asked."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        with held():
            try:
                yield
            except ServiceError:
                raise
            except BaseException:
                self._refusal = _broken()
                raise


def closed() -> ServiceError:
    """Something was asked after the end."""
    return ServiceError(Code.FAILED_PRECONDITION, "CLOSED", "this LLM is closed: make a new one")


def _broken() -> ServiceError:
    return ServiceError(
        Code.ABORTED, "BROKEN", "this LLM was broken off in the middle of a step: close it, and make a new one"
    )


def _unrecorded(envelope: Envelope, phase: Phase) -> None:
    """Nobody traces."""
