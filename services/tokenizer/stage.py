"""The tokenizer's place in the ring: Submit and Append in; Prompt, Result, Append or Failed out.

Encoding runs in a thread pool, so that probes and other requests' control pass meanwhile; order holds per request: a
Cancel drops its own unfinished encoding, anything else waits for it. Knows no engine and no socket.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from engine.errors import ServiceError, engine_fault
from engine.request import Limits, check_params, check_prompt
from services.messages import (
    Append,
    Cancel,
    CloseInput,
    Detokenized,
    Envelope,
    Grant,
    Message,
    Prompt,
    Result,
    Submit,
    Tokenized,
    Update,
    failed,
)
from services.tokenizer.encoding import TextEncoder, unpack_checked
from services.tokenizer.lanes import Lanes
from services.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    TextOptions,
    TextPrompt,
    Tokenize,
    TokenPrompt,
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
            case Cancel() | Grant() | Append() | Update() | CloseInput():
                self._lanes.follow(message)
            case _:
                self._emit(message)

    def _start(self, message: Submit | Append) -> Future[Message]:
        """Encode in a thread."""
        future: Future[Message] = self._executor.submit(self._answer, message, time.monotonic())
        return future

    def _watch(self, message: Submit | Append, future: Future[Message]) -> None:
        """Come back when it is done."""
        start = time.monotonic()
        future.add_done_callback(lambda done: self._on_loop(lambda: self._finish(message, start, done)))

    def _finish(self, message: Submit | Append, start: float, future: Future[Message]) -> None:
        """On the loop: send the answer, unless a Cancel or a later attempt came first."""
        if not self._lanes.is_current(message.envelope, future):
            return
        answer = failed(message.envelope, engine_fault()) if future.exception() else future.result()
        if isinstance(message, Submit):
            num_tokens = len(answer.ids) // 4 if isinstance(answer, Prompt) else 0
            self._record("tokenize", message.envelope, start, time.monotonic(), {"sluice.prompt_tokens": num_tokens})
        self._lanes.finish(message.envelope, answer)

    def _answer(self, message: Submit | Append, start: float) -> Message:
        """In a thread: do the work."""
        try:
            if isinstance(message, Append):
                return Append(message.envelope, TokenPrompt(pack_ids(self._encode_more(message.piece))))
            return self._do(message, message.work, start)
        except ServiceError as error:
            return failed(message.envelope, error)

    def _do(self, submit: Submit, work: Work, start: float) -> Message:
        envelope = submit.envelope
        match work:
            case Generate():
                check_params(work.params, self._limits)
                ids, text = self._prompt(work)
                ids = ids[-work.keep_last :]
                for piece in work.more:
                    ids = ids + self._encode_more(piece)
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

    def _encode_more(self, piece: TextPrompt | TokenPrompt) -> list[int]:
        """A further piece of a prompt."""
        if isinstance(piece, TextPrompt):
            return self._encoder.encode_more(piece.text, self._limits)
        return unpack_checked(piece.ids, self._limits, "append.token_ids")

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
