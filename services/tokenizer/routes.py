"""Routes a message to an encoder by its size: short texts to threads, longer ones to child processes.

The child processes have a lower priority, so that long texts delay neither short ones nor the engine. A fair queue is
in front of each.
"""

import dataclasses
import functools
from concurrent.futures import Executor, Future

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.services.messages.messages import Append, Submit, failed
from sluice_server.services.messages.work import (
    ChatPrompt,
    Detokenize,
    DropAdapter,
    Embed,
    Generate,
    LoadAdapter,
    PairPrompt,
    PromptInput,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)
from sluice_server.services.tokenizer.answers import Answers, EncodedMessage
from sluice_server.services.tokenizer.encoders import Encoders
from sluice_server.services.tokenizer.fair_executor import FairExecutor

SHORT_BYTES = 16 << 10  # of text: about 10 ms of work
MIDDLE_BYTES = 128 << 10  # of text: about 100 ms
# Bytes of text that take as long as one byte of ids: to check the ids, and to decode them.
BYTES_PER_ID_BYTE = 1 / 16
BYTES_PER_DECODED_ID_BYTE = 1 / 4


@dataclasses.dataclass(frozen=True, slots=True)
class EncodingPool:
    """A pool of child processes for messages of up to `max_bytes`, and the threads that wait for them."""

    max_bytes: int
    executor: Executor
    encoders: Encoders


class EncodingRoutes:
    """All routes, and the fair queue of each."""

    def __init__(
        self, answers: Answers, short: Executor, chats: Executor | None, apart: tuple[EncodingPool, ...]
    ) -> None:
        self._answers = answers
        self._short: FairExecutor[EncodedMessage] = FairExecutor(short)
        self._chats = self._short if chats is None else FairExecutor[EncodedMessage](chats)
        self._apart = tuple((way, FairExecutor[EncodedMessage](way.executor)) for way in apart)

    def begin(self, message: Submit | Append, start: float) -> Future[EncodedMessage]:
        """Starts to encode a message that arrived at `start`; returns the future of its answer.

        A full queue is an answer too: `Failed` with QUEUE_FULL.
        """
        size = size_of(message)
        way, request = self._of(message, size)
        call = functools.partial(self._answer, way, message, start)
        try:
            return request.submit(message.envelope.tenant, size, call)
        except ServiceError as error:
            refused: Future[EncodedMessage] = Future()
            refused.set_result(EncodedMessage(failed(message.envelope, error)))
            return refused

    def _of(self, message: Submit | Append, size: int) -> tuple[EncodingPool | None, FairExecutor[EncodedMessage]]:
        if size <= SHORT_BYTES or not self._apart or _is_ranking(message):
            return None, self._chats if _is_chat(message) else self._short
        return next((one for one in self._apart if size <= one[0].max_bytes), self._apart[-1])

    def _answer(self, way: EncodingPool | None, message: Submit | Append, start: float) -> EncodedMessage:
        """Encodes a message on a thread of the executor."""
        if way is None:
            return self._answers.answer(message, start)
        try:
            return way.encoders.answer(message, start, self._answers.prepare(message))
        except ServiceError as error:
            return EncodedMessage(failed(message.envelope, error))


def size_of(message: Submit | Append) -> int:
    """Returns how many bytes of text take about as long to encode as this message."""
    work = message.work if isinstance(message, Submit) else None
    match work:
        case None:
            assert isinstance(message, Append)
            return _num_bytes(message.piece)
        case Generate():
            return sum(map(_num_bytes, (work.prompt, *work.more))) + sum(map(len, work.bad_words))
        case Tokenize():
            return _num_bytes(work.prompt)
        case Embed():
            return sum(_num_bytes(one) + len(work.instruction) for one in work.inputs)
        case Detokenize():
            return round(len(work.ids) * BYTES_PER_DECODED_ID_BYTE)
        case LoadAdapter() | DropAdapter():
            return 0  # nothing to encode


def _num_bytes(prompt: PromptInput | PairPrompt) -> int:
    match prompt:
        case PairPrompt():
            return len(prompt.first.encode(errors="replace")) + len(prompt.second.encode(errors="replace"))
        case TextPrompt():
            return len(prompt.text) if prompt.text.isascii() else len(prompt.text.encode(errors="replace"))
        case TokenPrompt():
            return round(len(prompt.ids) * BYTES_PER_ID_BYTE)
        case ChatPrompt():
            return len(msgspec.msgpack.encode(prompt))


def _is_chat(message: Submit | Append) -> bool:
    work = message.work if isinstance(message, Submit) else None
    is_chat = isinstance(work, Generate | Tokenize) and isinstance(work.prompt, ChatPrompt)
    return is_chat or _is_ranking(message)


def _is_ranking(message: Submit | Append) -> bool:
    """Returns whether the inputs are chats, which a process for longer texts cannot render."""
    work = message.work if isinstance(message, Submit) else None
    return isinstance(work, Embed) and any(isinstance(one, ChatPrompt) for one in work.inputs)
