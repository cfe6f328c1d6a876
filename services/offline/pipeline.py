"""Runs the stages of a service in one thread: passes each stage's messages to the next, in ring order, without a ring.

All stages, and the request manager, are the service's own classes.
"""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator

from sluice_server.engine.errors import Code, DeviceLost, ServiceError
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.grammar_gate import GrammarGate
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.adapters.loads import Adapters
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Envelope, Failed, Grant, Message, Preempted, Result, Text
from sluice_server.services.messages.processes import Role
from sluice_server.services.offline.interrupts import held
from sluice_server.services.offline.loading import NAME, LoadedPipeline
from sluice_server.services.telemetry.logs import about
from sluice_server.services.telemetry.observed import Unobserved
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.tokenizer.inline_executor import InlineExecutor
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage

Take = Callable[[Message], None]


class Pipeline:
    """The stages of a service in one thread: `open` requests, `wait_encoded`, `turn` until they end, `close` them.

    For use by one thread at a time.
    """

    def __init__(self, loaded: LoadedPipeline) -> None:
        self.settings = loaded.gateway
        self.encoder = loaded.encoder
        self.engine = loaded.built.engine
        self._refusal: ServiceError | None = None  # the error for all calls after a failure or `shut`
        self._mail: deque[tuple[Take, Message]] = deque()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # callbacks of compiler threads
        self._manager = RequestManager(
            loaded.gateway,
            lambda message: self._mail.append((self._tokenizer.handle, message)),
            Unobserved(),
            time.monotonic,
            Books(loaded.gateway, Quotas(lambda tenant: TenantLimits(), 1), time.monotonic),
        )
        self._manager.refusal = None
        self._tokenizer = TokenizerStage(
            loaded.encoder,
            loaded.constraints,
            loaded.gateway.limits,
            EncodingThreads(InlineExecutor(), self._calls.put),
            lambda message: self._mail.append((self._gate.handle, message)),
            _unrecorded,
            images=loaded.images,
        )
        built = loaded.built
        engine = EngineStage(built.engine, RingMembership(NAME, 0), self._to_detokenizer, _unrecorded, built.computing)
        self._stage = engine
        self._adapters = Adapters(self._manager, lambda tenant, name: True)
        if loaded.gateway.limits.max_adapters:
            self._manager.engines.change((NAME,), ())
            self._manager.engines.admit(NAME)
            self._manager.adapters = self._adapters
        self._gate = GrammarGate(engine, built.grammars, InlineExecutor(), lambda: None, self._to_detokenizer)
        self._detokenizer = DetokenizerStage(
            loaded.encoder, lambda message: self._mail.append((self._deliver, message)), _unrecorded
        )

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return self._manager.books.admission.num_requests

    def open(self, asked: TranslatedRequest, opened: list[OpenRequest]) -> None:
        """Opens a request, adds it to `opened`, and encodes its prompt unless a constraint must be compiled first.
        Waits for its adapter if that is to be read first.

        An error becomes the request's outcome.
        """
        with self._whole():  # SIGINT is delayed until the request is in the list, so that the caller can close it
            opened.append(self._manager.open(CallMetadata(NAME), asked, streams=False))
            self._manager.submit(opened[-1])
            self._pass_on()
        while self.engine.adapters is not None and self._adapters.is_loading:
            self.engine.adapters.wait()  # SIGINT is handled here
            with self._whole():
                self._stage.answer_loads()
                self._pass_on()

    def wait_encoded(self) -> None:
        """Waits for constraints that are being compiled."""
        while self._tokenizer.num_encoding:
            call = self._calls.get()  # SIGINT is handled here
            with self._whole():
                call()
                self._pass_on()

    def turn(self) -> None:
        """Runs one engine step and delivers its results to the requests.

        Raises ServiceError if the engine has no work although requests are open.
        """
        with self._whole():
            again = self._gate.turn()
            self._pass_on()
            self._detokenizer.turn()
            self._pass_on()
            if not again and not self._gate.num_waiting and (stuck := self._stuck()) is not None:
                raise fault(Role.ENGINE, about(stuck.envelope), "has no work while requests are open")

    def close(self, *requests: OpenRequest) -> None:
        """Releases requests, ended or not; nothing more is computed for them."""
        if self._refusal is not None:
            return
        with self._whole():
            for request in requests:
                self._manager.close(request)
            self._pass_on()

    def shut(self) -> None:
        """Releases every request and rejects all further calls."""
        self._manager.fail_all(closed())
        self.close(*self._manager.requests)
        self._refusal = closed()
        del (
            self.engine,
            self._stage,
            self._tokenizer,
            self._gate,
            self._detokenizer,
        )  # an unfinished stream may still refer to self

    def _stuck(self) -> OpenRequest | None:
        """Returns a request that has not ended although no prompt is being encoded."""
        if self._tokenizer.num_encoding:
            return None
        return next((one for one in self._manager.requests if one.outcome is None), None)

    def _pass_on(self) -> None:
        while self._mail:
            take, message = self._mail.popleft()
            take(message)

    def _to_detokenizer(self, message: Message) -> None:
        self._mail.append((self._detokenizer.handle, message))

    def _deliver(self, message: Message) -> None:
        """Delivers a message to the request manager; drops reports of the engine's load."""
        if isinstance(message, Text | Failed | Result | Preempted):
            self._manager.answers.handle(message)
        elif isinstance(message, Grant):
            self._manager.changes.take_back(message)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Runs a block with SIGINT delayed; an exception other than ServiceError disables the pipeline.

        After such an exception the stages may be inconsistent, so all further calls raise `_refusal`.
        """
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        with held():
            try:
                yield
            except ServiceError:
                raise
            except DeviceLost as error:
                self._refusal = ServiceError(
                    Code.UNAVAILABLE, "DEVICE_LOST", f"{error}: close this LLM, and make a new one"
                )
                raise self._refusal from error
            except BaseException:
                self._refusal = _broken()
                raise


def closed() -> ServiceError:
    """Builds the error for a call after `close`."""
    return ServiceError(Code.FAILED_PRECONDITION, "CLOSED", "this LLM is closed: make a new one")


def _broken() -> ServiceError:
    return ServiceError(
        Code.ABORTED, "BROKEN", "this LLM was broken off in the middle of a step: close it, and make a new one"
    )


def _unrecorded(envelope: Envelope, phase: Phase) -> None:
    """Does nothing: offline inference records no traces."""
