"""The tokenizer stage of the ring: takes Submit and Append; gives Prompt, Inputs, Result, Append or Failed.

Brief work runs inline. Other encodings run elsewhere (`routes`), so that probes and other requests' messages pass
meanwhile; constraints are compiled on threads of their own. Order holds for each request: a Cancel drops the request's
unfinished encoding, every other message waits for it.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.faults import fault
from sluice_server.services.messages.messages import (
    Append,
    Cancel,
    CloseInput,
    Failed,
    Grant,
    Inputs,
    Message,
    OpenSerials,
    Prompt,
    Submit,
    Update,
    failed,
)
from sluice_server.services.messages.processes import CacheChanges, Report, Role
from sluice_server.services.routing.router import Choice
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.logs import about
from sluice_server.services.telemetry.phases import Phase, Record, Value
from sluice_server.services.tokenizer.answers import Answers, EncodedMessage
from sluice_server.services.tokenizer.awaiting import chained, with_grammar
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.inline_executor import is_brief
from sluice_server.services.tokenizer.prompt_images import PromptImages
from sluice_server.services.tokenizer.prompt_router import PromptRouter
from sluice_server.services.tokenizer.routes import EncodingPool, EncodingRoutes
from sluice_server.services.tokenizer.sequencer import RequestSequencer

Emit = Callable[[Message], None]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodingThreads:
    """The executors for encoding, and the way back to the event loop.

    Attributes:
        executor: for short texts.
        on_loop: runs a callable on the event loop's thread.
        chats: for short chats, which wait for a renderer process; None: they share `executor`.
        apart: pools for longer texts, the smallest first; if empty, `executor` encodes all.
    """

    executor: Executor
    on_loop: Callable[[Callable[[], None]], None]
    chats: Executor | None = None
    apart: tuple[EncodingPool, ...] = ()


class TokenizerStage:
    """Turns prompts into token ids."""

    def __init__(  # noqa: PLR0913 # the parts of a stage
        self,
        encoder: TextEncoder,
        constraints: Constraints,
        limits: Limits,
        threads: EncodingThreads,
        emit: Emit,
        record: Record,
        router: PromptRouter | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """`router` chooses engines; None leaves that to gateways. `images`: None for a model that takes none."""
        self.progress = 0
        self._router = router
        self._images = images
        self._constraints = constraints
        self._limits = limits
        self._answers = Answers(encoder, limits)
        self._routes = EncodingRoutes(self._answers, threads.executor, threads.chats, threads.apart)
        self._emit = emit = emit if router is None else _following(router, emit)
        self._on_loop = threads.on_loop
        self._record = record
        self._open = RequestSequencer(self._start, self._watch, emit)

    @property
    def num_encoding(self) -> int:
        """The number of requests with an encoding in progress."""
        return len(self._open)

    def turn(self) -> bool:
        """Does nothing: all work is started by messages."""
        return False

    def reap(self) -> None:
        """Does nothing: an encoding ends by itself."""

    def handle(self, message: Message) -> None:
        """Handles messages about prompts, in order for each request; forwards all others."""
        self.progress += 1
        match message:
            case Submit():
                self._open.begin(message)
            case Cancel(output_index=None):
                self._open.cancel(message.envelope)
                self._emit(message)
            case OpenSerials():
                self._open.drop(message.has_ended)
                self._emit(message)
            case Cancel() | Grant() | Append() | Update() | CloseInput():
                self._open.follow(message)
            case Report():
                if self._router is not None:
                    self._router.report(message)
            case CacheChanges():
                if self._router is not None:
                    self._router.cached(message)
            case _:
                self._emit(message)

    def _start(self, message: Submit | Append) -> Message | Future[EncodedMessage]:
        """Starts to encode a message by its size, then to compile its constraint and prepare its images. Returns the
        answer itself where nothing is to be waited for."""
        start = time.monotonic()
        if is_brief(message):
            made = self._at_once(message, start)
            if (whole := self._with_known(made)) is not None:
                return self._told(message, start, whole)
            encoding: Future[EncodedMessage] = Future()
            encoding.set_result(made)
        else:
            encoding = self._routes.begin(message, start)
        chain = chained(encoding, self._constraints.executor, self._with_known, self._constrain)
        return chain if self._images is None else self._images.follow(message, chain)

    def _at_once(self, message: Submit | Append, start: float) -> EncodedMessage:
        """Encodes a message inline: futures and threads take longer than brief work does."""
        try:
            return self._answers.answer(message, start)
        except Exception as error:
            return EncodedMessage(_broken(message, error))

    def _watch(self, message: Submit | Append, future: Future[EncodedMessage]) -> None:
        """Calls `_finish` on the loop when the encoding is done."""
        start = time.monotonic()
        if future.done():
            self._finish(message, start, future)
        else:
            future.add_done_callback(lambda done: self._on_loop(lambda: self._finish(message, start, done)))

    def _finish(self, message: Submit | Append, start: float, future: Future[EncodedMessage]) -> None:
        """Emits the answer, on the loop, unless a Cancel or a later attempt came first."""
        if not self._open.is_current(message.envelope, future):
            return
        made = EncodedMessage(_broken(message, error)) if (error := future.exception()) is not None else future.result()
        self._open.finish(message.envelope, self._told(message, start, made))

    def _told(self, message: Submit | Append, start: float, made: EncodedMessage) -> Message:
        """Returns the answer to a message, routed; records its phases and emits what is sent ahead of it."""
        answer, choice = made.answer, None
        if isinstance(message, Submit):
            if self._router is not None and isinstance(answer, Prompt):
                answer, choice = self._router.route(message, answer)
            self._record(message.envelope, _phase(start, answer, choice))
            if made.images_s is not None and isinstance(answer, Prompt):
                attributes: dict[str, Value] = {names.NUM_IMAGES: len(answer.images)}
                self._record(message.envelope, Phase(names.SPAN_IMAGES, *made.images_s, attributes))
        if made.prompt_report is not None:
            self._emit(made.prompt_report)
        return answer

    def _with_known(self, made: EncodedMessage) -> EncodedMessage | None:
        """Returns the message with its grammar if that is cached, unchanged if it needs none; else None."""
        grammar = "" if made.job is None else self._constraints.known(made.job)
        return None if grammar is None else self._with(made, grammar, 0.0)

    def _constrain(self, lacking: EncodedMessage) -> EncodedMessage:
        """Compiles the grammar, on a thread of the compilers."""
        start = time.monotonic()
        assert lacking.job is not None
        try:
            grammar = self._constraints.compile(lacking.job)
        except ServiceError as error:
            return EncodedMessage(failed(lacking.answer.envelope, error))
        return self._with(lacking, grammar, time.monotonic() - start)

    def _with(self, made: EncodedMessage, grammar: str, took: float) -> EncodedMessage:
        if not grammar or not isinstance(made.answer, Prompt):
            return made
        try:
            return EncodedMessage(with_grammar(made.answer, grammar, self._limits, took), made.prompt_report)
        except ServiceError as error:
            return EncodedMessage(failed(made.answer.envelope, error))


def _broken(message: Submit | Append, error: BaseException) -> Failed:
    """Builds the Failed message of a request on which encoding raised an unexpected exception."""
    work = type(message.work if isinstance(message, Submit) else message).__name__
    extra = about(message.envelope, work=work)
    return failed(message.envelope, fault(Role.TOKENIZER, extra, "failed while encoding this request", error))


def _following(router: PromptRouter, emit: Emit) -> Emit:
    """Returns `emit` with each message sent to the engine that has its prompt."""
    return lambda message: emit(router.follow(message))


def _phase(start: float, answer: Message, choice: Choice | None = None) -> Phase:
    """Builds the trace phase of a Submit."""
    packed = (answer.ids,) if isinstance(answer, Prompt) else answer.ids if isinstance(answer, Inputs) else ()
    num_tokens = sum(map(len, packed)) // 4
    error = answer.reason if isinstance(answer, Failed) else ""
    attributes: dict[str, Value] = {names.NUM_PROMPT: num_tokens}
    if choice is not None:
        attributes |= {names.ENGINE: choice.engine, names.ROUTING: choice.reason, names.NUM_EXPECTED: choice.num_cached}
        attributes[names.NUM_AHEAD] = round(choice.num_waiting)
    return Phase(names.SPAN_TOKENIZE, start, time.monotonic(), attributes, error=error)
