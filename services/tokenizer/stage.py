"""The tokenizer's place in the ring: Submit in; Prompt, Result or Failed out.

Encoding runs in a thread pool, so that probes and other requests' control pass meanwhile, and what compiles constraints
in another one; order holds per request: a Cancel drops its own unfinished encoding. Knows no engine and no socket.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from engine.errors import ServiceError, engine_fault
from engine.request import Limits, check_params, check_prompt
from services.messages import (
    Cancel,
    Detokenized,
    Envelope,
    Message,
    Prompt,
    Result,
    Submit,
    Tokenized,
    failed,
)
from services.tokenizer.constrained import job_of
from services.tokenizer.constraints import Constraints
from services.tokenizer.encoding import TextEncoder
from services.tokenizer.grammar_frames import Job
from services.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    Sections,
    TextOptions,
    Tokenize,
    Work,
    pack_ids,
)

Emit = Callable[[Message], None]
# (name, envelope, start and end on the monotonic clock, attributes)
Record = Callable[[str, Envelope, float, float, dict[str, int]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Unconstrained:
    """A prompt that lacks its grammar."""

    prompt: Prompt
    job: Job


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
        self._emit = emit
        self._on_loop = threads.on_loop
        self._record = record
        self._encoding: dict[str, tuple[int, Future[Message]]] = {}  # request → attempt, its work

    @property
    def num_encoding(self) -> int:
        """Requests whose prompt is being encoded."""
        return len(self._encoding)

    def turn(self) -> bool:
        """Nothing between messages."""
        return False

    def handle(self, message: Message) -> None:
        """Take a Submit or a Cancel; pass anything else on."""
        self.progress += 1
        match message:
            case Submit():
                self._begin(message)
            case Cancel(output_index=None):
                if message.envelope.attempt >= self._attempt(message.envelope):
                    self._drop(message.envelope.request_id)
                self._emit(message)
            case _:
                self._emit(message)

    def _attempt(self, envelope: Envelope) -> int:
        """The newest attempt of a request whose prompt is being encoded, or -1."""
        return self._encoding.get(envelope.request_id, (-1, None))[0]

    def _drop(self, request_id: str) -> None:
        """Give up an encoding that has not ended."""
        under_way = self._encoding.pop(request_id, None)
        if under_way is not None:
            under_way[1].cancel()

    def _begin(self, submit: Submit) -> None:
        if submit.envelope.attempt <= self._attempt(submit.envelope):
            return
        self._drop(submit.envelope.request_id)
        start = time.monotonic()
        encoding = self._executor.submit(self._answer, submit, start)
        future: Future[Message] = chained(encoding, self._constraints.executor, self._constrain)
        self._encoding[submit.envelope.request_id] = (submit.envelope.attempt, future)
        future.add_done_callback(lambda done: self._on_loop(lambda: self._finish(submit, start, done)))

    def _finish(self, submit: Submit, start: float, future: Future[Message]) -> None:
        """On the loop: send the answer, unless a Cancel or a later attempt came first."""
        if self._encoding.get(submit.envelope.request_id, (0, None))[1] is not future:
            return
        del self._encoding[submit.envelope.request_id]
        error = future.exception()
        answer = failed(submit.envelope, engine_fault()) if error else future.result()
        num_tokens = len(answer.ids) // 4 if isinstance(answer, Prompt) else 0
        self._record("tokenize", submit.envelope, start, time.monotonic(), {"sluice.prompt_tokens": num_tokens})
        self._emit(answer)

    def _answer(self, submit: Submit, start: float) -> Message | Unconstrained:
        """In a thread: do the work."""
        try:
            return self._do(submit.envelope, submit.work, start)
        except ServiceError as error:
            return failed(submit.envelope, error)

    def _constrain(self, lacking: Unconstrained) -> Message:
        """In another thread: compile the grammar."""
        start = time.monotonic()
        try:
            grammar = self._constraints.compile(lacking.job)
            return _with_grammar(lacking.prompt, grammar, self._limits, time.monotonic() - start)
        except ServiceError as error:
            return failed(lacking.prompt.envelope, error)

    def _do(self, envelope: Envelope, work: Work, start: float) -> Message | Unconstrained:
        match work:
            case Generate():
                check_params(work.params, self._limits)
                ids, sections = self._prompt(work)
                ids = ids[-work.keep_last :]
                check_prompt(len(ids), work.params, self._limits)
                if work.echo:
                    told = Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
                    self._on_loop(lambda: self._emit(told))  # in order: the Prompt's turn comes behind it
                took = time.monotonic() - start
                envelope = _later(envelope, took)
                text = _text(work.text, sections)
                prompt = Prompt(envelope, pack_ids(ids), work.params, work.stops, work.scheduling, took, text)
                return self._constrained(prompt, job_of(work, sections, self._encoder.mark))
            case Tokenize():
                ids = self._encoder.encode(work.prompt, self._limits, work.add_special_tokens)
                return Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
            case Detokenize():
                decoded = self._encoder.decode(work.ids, self._limits, work.skip_special_tokens)
                return Result(envelope, Detokenized(decoded))

    def _prompt(self, work: Generate) -> tuple[list[int], Sections]:
        """The ids, and what may follow them."""
        if isinstance(work.prompt, ChatPrompt):
            return self._encoder.encode_chat(work.prompt, self._limits)
        return self._encoder.encode(work.prompt, self._limits), Sections()

    def _constrained(self, prompt: Prompt, job: Job | None) -> Prompt | Unconstrained:
        """The prompt with its grammar, if that is known."""
        if job is None:
            return prompt
        grammar = self._constraints.known(job)
        return Unconstrained(prompt, job) if grammar is None else _with_grammar(prompt, grammar, self._limits)


def chained(
    first: "Future[Message | Unconstrained]", executor: Executor, then: Callable[[Unconstrained], Message]
) -> Future[Message]:
    """What `first` makes, or what `then` makes of it in the executor; cancelled, nothing more is begun."""
    whole: Future[Message] = Future()

    def go_on(done: "Future[Message | Unconstrained]") -> None:
        if done.cancelled() or not whole.set_running_or_notify_cancel():
            return
        if done.exception() is None and isinstance(made := done.result(), Unconstrained):
            executor.submit(then, made).add_done_callback(end)
        else:
            end(done)

    def end(done: "Future[Message] | Future[Message | Unconstrained]") -> None:
        error = done.exception()
        if error is not None:
            whole.set_exception(error)
            return
        made = done.result()
        assert not isinstance(made, Unconstrained)
        whole.set_result(made)

    whole.add_done_callback(lambda whole: first.cancel() if whole.cancelled() else None)
    first.add_done_callback(go_on)
    return whole


def _text(asked: TextOptions, sections: Sections) -> TextOptions:
    """How text is made of what follows the prompt."""
    found = sections if asked.split_sections and (sections.has_reasoning or sections.tools) else None
    return msgspec.structs.replace(asked, sections=found)


def _with_grammar(prompt: Prompt, grammar: str, limits: Limits, took: float = 0.0) -> Prompt:
    """The prompt, `took` seconds later. Raises ServiceError for parameters that do not go with a grammar."""
    params = dataclasses.replace(prompt.params, grammar=grammar)
    check_params(params, limits)
    return msgspec.structs.replace(
        prompt, envelope=_later(prompt.envelope, took), params=params, tokenize_s=prompt.tokenize_s + took
    )


def _later(envelope: Envelope, seconds: float) -> Envelope:
    """The envelope with its time left re-stamped after `seconds` in this stage."""
    if envelope.time_left_s is None:
        return envelope
    return msgspec.structs.replace(envelope, time_left_s=envelope.time_left_s - seconds)
