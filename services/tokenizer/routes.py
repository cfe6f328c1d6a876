"""Where a message is encoded, by how much there is of it: short texts in threads of this process, longer ones in
processes of their own and of a lower priority, so that they hold up neither short ones nor the engine.

In front of each is a fair queue. Knows no tokenizer.
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
    Generate,
    PromptInput,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)
from sluice_server.services.tokenizer.answers import Answers, EncodedMessage
from sluice_server.services.tokenizer.encoders import Encoders
from sluice_server.services.tokenizer.fair_executor import FairExecutor

SHORT_BYTES = 16 << 10  # of text: some 10 ms of work
MIDDLE_BYTES = 128 << 10  # some 100 ms
# Of a text's bytes as many as a byte of ids takes time: to check them, to make text of them.
BYTES_PER_ID_BYTE = 1 / 16
BYTES_PER_DECODED_ID_BYTE = 1 / 4


@dataclasses.dataclass(frozen=True, slots=True)
class EncodingPool:
    """Processes that encode messages of up to so many bytes, and the threads that wait for them."""

    max_bytes: int
    executor: Executor
    encoders: Encoders


class EncodingRoutes:
    """All of them."""

    def __init__(
        self, answers: Answers, short: Executor, chats: Executor | None, apart: tuple[EncodingPool, ...]
    ) -> None:
        self._answers = answers
        self._short: FairExecutor[EncodedMessage] = FairExecutor(short)
        self._chats = self._short if chats is None else FairExecutor[EncodedMessage](chats)
        self._apart = tuple((way, FairExecutor[EncodedMessage](way.executor)) for way in apart)

    def begin(self, message: Submit | Append, start: float) -> Future[EncodedMessage]:
        """What becomes of a message that came at `start`."""
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
        if size <= SHORT_BYTES or not self._apart:
            return None, self._chats if _is_chat(message) else self._short
        return next((one for one in self._apart if size <= one[0].max_bytes), self._apart[-1])

    def _answer(self, way: EncodingPool | None, message: Submit | Append, start: float) -> EncodedMessage:
        """On a thread."""
        if way is None:
            return self._answers.answer(message, start)
        try:
            return way.encoders.answer(message, start, self._answers.prepare(message))
        except ServiceError as error:
            return EncodedMessage(failed(message.envelope, error))


def size_of(message: Submit | Append) -> int:
    """Bytes of text that take about as long to encode."""
    work = message.work if isinstance(message, Submit) else None
    match work:
        case None:
            assert isinstance(message, Append)
            return _num_bytes(message.piece)
        case Generate():
            return sum(map(_num_bytes, (work.prompt, *work.more))) + sum(map(len, work.bad_words))
        case Tokenize():
            return _num_bytes(work.prompt)
        case Detokenize():
            return round(len(work.ids) * BYTES_PER_DECODED_ID_BYTE)


def _num_bytes(prompt: PromptInput) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text) if prompt.text.isascii() else len(prompt.text.encode(errors="replace"))
        case TokenPrompt():
            return round(len(prompt.ids) * BYTES_PER_ID_BYTE)
        case ChatPrompt():
            return len(msgspec.msgpack.encode(prompt))


def _is_chat(message: Submit | Append) -> bool:
    work = message.work if isinstance(message, Submit) else None
    return isinstance(work, Generate | Tokenize) and isinstance(work.prompt, ChatPrompt)
