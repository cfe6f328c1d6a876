"""The tokenizer's place in the ring: Submit and Append in; Prompt, Result, Append or Failed out.

Encoding runs in a thread pool, so that probes and other requests' control pass meanwhile, unless it is brief; what
compiles constraints in another one; order holds per request: a Cancel drops its own unfinished encoding, anything else
waits for it. Knows no engine and no socket.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from engine.checks import check_params, check_prompt
from engine.errors import ServiceError
from engine.request import Limits, SamplingParams
from services.details import Detokenized, Tokenized
from services.faults import fault
from services.messages import (
    Append,
    Cancel,
    Census,
    CloseInput,
    Failed,
    Grant,
    Message,
    Prompt,
    Result,
    Role,
    Submit,
    Update,
    failed,
)
from services.telemetry import names
from services.telemetry.logs import about
from services.telemetry.phases import Phase, Record
from services.tokenizer.awaiting import Unconstrained, chained, later, with_grammar
from services.tokenizer.brief import AtOnce, is_brief
from services.tokenizer.constrained import job_of
from services.tokenizer.constraints import Constraints
from services.tokenizer.encoding import TextEncoder, unpack_checked
from services.tokenizer.grammar_frames import Job
from services.tokenizer.lanes import Lanes
from services.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    Sections,
    TextOptions,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Work,
    pack_ids,
)

Emit = Callable[[Message], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Threads:
    """Where encoding runs, and the way back: `on_loop` runs a callable on the loop's thread."""

    executor: Executor
    on_loop: Callable[[Callable[[], None]], None]


class TokenizerStage:
    """Turns prompts into token ids."""

    def __init__(
        self,
        encoder: TextEncoder,
        constraints: Constraints,
        limits: Limits,
        threads: Threads,
        emit: Emit,
        record: Record,
    ) -> None:
        self.progress = 0
        self._encoder = encoder
        self._constraints = constraints
        self._limits = limits
        self._executor = threads.executor
        self._at_once = AtOnce()
        self._emit = emit
        self._on_loop = threads.on_loop
        self._record = record
        self._lanes = Lanes(self._start, self._watch, emit)

    @property
    def num_encoding(self) -> int:
        """Requests of which something is being encoded."""
        return len(self._lanes)

    def turn(self) -> bool:
        """Nothing between messages."""
        return False

    def reap(self) -> None:
        """Nothing: an encoding ends by itself."""

    def handle(self, message: Message) -> None:
        """Take what concerns a prompt, in the order of its request; pass anything else on."""
        self.progress += 1
        match message:
            case Submit():
                self._lanes.begin(message)
            case Cancel(output_index=None):
                self._lanes.cancel(message.envelope)
                self._emit(message)
            case Census():
                self._lanes.drop(message.has_ended)
                self._emit(message)
            case Cancel() | Grant() | Append() | Update() | CloseInput():
                self._lanes.follow(message)
            case _:
                self._emit(message)

    def _start(self, message: Submit | Append) -> Future[Message]:
        """Encode, in a thread if that may take long; compile what constrains the output in another one."""
        executor = self._at_once if is_brief(message) else self._executor
        encoding = executor.submit(self._answer, message, time.monotonic())
        return chained(encoding, self._constraints.executor, self._constrain)

    def _watch(self, message: Submit | Append, future: Future[Message]) -> None:
        """Come back when it is done."""
        start = time.monotonic()
        if future.done():
            self._finish(message, start, future)
        else:
            future.add_done_callback(lambda done: self._on_loop(lambda: self._finish(message, start, done)))

    def _finish(self, message: Submit | Append, start: float, future: Future[Message]) -> None:
        """On the loop: send the answer, unless a Cancel or a later attempt came first."""
        if not self._lanes.is_current(message.envelope, future):
            return
        answer = _broken(message, error) if (error := future.exception()) is not None else future.result()
        self._lanes.finish(message.envelope, answer)
        if isinstance(message, Submit):
            self._record(message.envelope, _phase(start, answer))

    def _answer(self, message: Submit | Append, start: float) -> Message | Unconstrained:
        """Do the work, on whatever thread."""
        try:
            if isinstance(message, Append):
                return Append(message.envelope, TokenPrompt(pack_ids(self._encode_more(message.piece))), message.index)
            return self._do(message, message.work, start)
        except ServiceError as error:
            return failed(message.envelope, error)

    def _constrain(self, lacking: Unconstrained) -> Message:
        """In another thread: compile the grammar."""
        start = time.monotonic()
        try:
            grammar = self._constraints.compile(lacking.job)
            return with_grammar(lacking.prompt, grammar, self._limits, time.monotonic() - start)
        except ServiceError as error:
            return failed(lacking.prompt.envelope, error)

    def _do(self, submit: Submit, work: Work, start: float) -> Message | Unconstrained:
        envelope = submit.envelope
        match work:
            case Generate():
                check_params(work.params, self._limits)
                ids, sections = self._prompt(work)
                ids = ids[-work.keep_last :]
                for piece in work.more:
                    ids = ids + self._encode_more(piece)
                check_prompt(len(ids), work.params, self._limits)
                if work.echo:
                    told = Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
                    self._on_loop(lambda: self._emit(told))  # in order: the Prompt's turn comes behind it
                took = time.monotonic() - start
                envelope, text = later(envelope, took), _text(work.text, sections)
                prompt = Prompt(
                    envelope, pack_ids(ids), self._params(work), work.stops, work.scheduling, took, text, submit.resume
                )
                return self._constrained(prompt, job_of(work, sections, self._encoder.mark))
            case Tokenize():
                ids = self._encoder.encode(work.prompt, self._limits, work.add_special_tokens)
                return Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
            case Detokenize():
                decoded = self._encoder.decode(work.ids, self._limits, work.skip_special_tokens)
                return Result(envelope, Detokenized(decoded))

    def _encode_more(self, piece: TextPrompt | TokenPrompt) -> list[int]:
        """A further piece of a prompt."""
        if isinstance(piece, TextPrompt):
            return self._encoder.encode_more(piece.text, self._limits)
        return unpack_checked(piece.ids, self._limits, "append.token_ids")

    def _prompt(self, work: Generate) -> tuple[list[int], Sections]:
        """The ids, and what may follow them."""
        if isinstance(work.prompt, ChatPrompt):
            return self._encoder.encode_chat(work.prompt, self._limits)
        return self._encoder.encode(work.prompt, self._limits), Sections()

    def _params(self, work: Generate) -> SamplingParams:
        """With the ids of words."""
        if not work.bad_words:
            return work.params
        params = dataclasses.replace(work.params, bad_words=self._encoder.encode_words(work.bad_words, self._limits))
        check_params(params, self._limits)
        return params

    def _constrained(self, prompt: Prompt, job: Job | None) -> Prompt | Unconstrained:
        """The prompt with its grammar, if that is known."""
        if job is None:
            return prompt
        grammar = self._constraints.known(job)
        return Unconstrained(prompt, job) if grammar is None else with_grammar(prompt, grammar, self._limits)


def _broken(message: Submit | Append, error: BaseException) -> Failed:
    """The end of a request on which this process failed."""
    work = type(message.work if isinstance(message, Submit) else message).__name__
    told = about(message.envelope, work=work)
    return failed(message.envelope, fault(Role.TOKENIZER, told, "failed while encoding this request", error))


def _phase(start: float, answer: Message) -> Phase:
    """What became of a Submit."""
    num_tokens = len(answer.ids) // 4 if isinstance(answer, Prompt) else 0
    error = answer.reason if isinstance(answer, Failed) else ""
    return Phase(names.SPAN_TOKENIZE, start, time.monotonic(), {names.NUM_PROMPT: num_tokens}, error=error)


def _text(asked: TextOptions, sections: Sections) -> TextOptions:
    """How text is made of what follows the prompt."""
    found = sections if asked.split_sections and (sections.has_reasoning or sections.tools) else None
    return msgspec.structs.replace(asked, sections=found)
