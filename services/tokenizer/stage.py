"""The tokenizer's place in the ring: Submit in; Prompt, Result or Failed out.

Encoding runs in a thread pool, so that probes and other requests' control pass meanwhile; order holds per request: a
Cancel drops its own unfinished encoding. Knows no engine and no socket.
"""

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
from services.tokenizer.encoding import TextEncoder
from services.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    TextOptions,
    Tokenize,
    Work,
    pack_ids,
)

Emit = Callable[[Message], None]
# (name, envelope, start and end on the monotonic clock, attributes)
Record = Callable[[str, Envelope, float, float, dict[str, int]], None]


class TokenizerStage:
    """Turns prompts into token ids."""

    def __init__(
        self,
        encoder: TextEncoder,
        limits: Limits,
        executor: Executor,
        emit: Emit,
        on_loop: Callable[[Callable[[], None]], None],
        record: Record,
    ) -> None:
        """`on_loop` runs a callable on the loop's thread; it is called from the executor's threads."""
        self.progress = 0
        self._encoder = encoder
        self._limits = limits
        self._executor = executor
        self._emit = emit
        self._on_loop = on_loop
        self._record = record
        self._encoding: dict[str, tuple[int, Future[Message]]] = {}  # request → attempt, its work

    @property
    def num_encoding(self) -> int:
        """Requests whose prompt is being encoded."""
        return len(self._encoding)

    def turn(self) -> bool:
        """Nothing between messages."""
        return False

    def reap(self) -> None:
        """Nothing: an encoding ends by itself."""

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
        future = self._executor.submit(self._answer, submit, start)
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

    def _answer(self, submit: Submit, start: float) -> Message:
        """In a thread: do the work."""
        try:
            return self._do(submit, submit.work, start)
        except ServiceError as error:
            return failed(submit.envelope, error)

    def _do(self, submit: Submit, work: Work, start: float) -> Message:
        envelope = submit.envelope
        match work:
            case Generate():
                check_params(work.params, self._limits)
                ids, text = self._prompt(work)
                ids = ids[-work.keep_last :]
                check_prompt(len(ids), work.params, self._limits)
                if work.echo:
                    told = Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
                    self._on_loop(lambda: self._emit(told))  # in order: the Prompt's turn comes behind it
                took = time.monotonic() - start
                envelope = _later(envelope, took)
                return Prompt(
                    envelope, pack_ids(ids), work.params, work.stops, work.scheduling, took, text, submit.resume
                )
            case Tokenize():
                ids = self._encoder.encode(work.prompt, self._limits, work.add_special_tokens)
                return Result(envelope, Tokenized(pack_ids(ids), self._encoder.pieces(ids)))
            case Detokenize():
                decoded = self._encoder.decode(work.ids, self._limits, work.skip_special_tokens)
                return Result(envelope, Detokenized(decoded))

    def _prompt(self, work: Generate) -> tuple[list[int], TextOptions]:
        """The ids, and how text is made of what follows them."""
        if not isinstance(work.prompt, ChatPrompt):
            return self._encoder.encode(work.prompt, self._limits), work.text
        ids, sections = self._encoder.encode_chat(work.prompt, self._limits)
        found = sections if work.text.split_sections and (sections.has_reasoning or sections.tools) else None
        return ids, msgspec.structs.replace(work.text, sections=found)


def _later(envelope: Envelope, seconds: float) -> Envelope:
    """The envelope with its time left re-stamped after `seconds` in this stage."""
    if envelope.time_left_s is None:
        return envelope
    return msgspec.structs.replace(envelope, time_left_s=envelope.time_left_s - seconds)
