"""Keeps each request's messages in order while a part of it is being encoded: later messages wait for the encoding.

Encodings run elsewhere and end in any order; the messages of one request leave in the order of arrival. `start` begins
an encoding and returns its future, or the answer itself if that is there at once.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeGuard

import msgspec

from sluice_server.services.messages.messages import Append, Cancel, Change, Envelope, Failed, Message, Submit, Update
from sluice_server.services.messages.work import TextPrompt
from sluice_server.services.tokenizer.answers import EncodedMessage

Behind = Change | Cancel  # only a Cancel of one output
Start = Callable[[Submit | Append], Message | Future[EncodedMessage]]
Watch = Callable[[Submit | Append, Future[EncodedMessage]], None]


@dataclasses.dataclass(slots=True)
class _SequencedRequest:
    """A request with an encoding in progress, and the messages that arrived after it."""

    envelope: Envelope
    future: Future[EncodedMessage]
    waiting: deque[tuple[Behind, float]]  # message, time of arrival


class RequestSequencer:
    """All requests with an encoding in progress."""

    def __init__(self, start: Start, watch: Watch, emit: Callable[[Message], None]) -> None:
        """`start` begins an encoding; `watch` arranges that `finish` is called when it has ended, perhaps at once."""
        self._start = start
        self._watch = watch
        self._emit = emit
        self._open: dict[str, _SequencedRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, submit: Submit) -> None:
        """Starts a request. It replaces an earlier attempt and is dropped behind a later one."""
        envelope = submit.envelope
        if envelope.attempt > self._attempt(envelope):
            self._drop(envelope)
            self._encode(submit, deque())

    def follow(self, message: Behind) -> None:
        """Takes a message behind its request; it passes at once if none of the request's parts is being encoded."""
        request = self._open.get(message.envelope.request_id)
        if request is None and _is_text(message):
            self._encode(message, deque())
        elif request is None:
            self._emit(message)
        elif request.envelope.attempt == message.envelope.attempt:
            request.waiting.append((message, time.monotonic()))

    def cancel(self, envelope: Envelope) -> None:
        """Drops a request's encoding and the messages that wait for it."""
        if envelope.attempt >= self._attempt(envelope):
            self._drop(envelope)

    def drop(self, has_ended: Callable[[Envelope], bool]) -> None:
        """Drops the encodings of requests that have ended."""
        for envelope in [request.envelope for request in self._open.values() if has_ended(request.envelope)]:
            self._drop(envelope)

    def is_current(self, envelope: Envelope, future: Future[EncodedMessage]) -> bool:
        """Returns True if the result of this encoding is still wanted."""
        request = self._open.get(envelope.request_id)
        return request is not None and request.future is future

    def finish(self, envelope: Envelope, answer: Message) -> None:
        """Emits the result of a request's current encoding, then the messages that waited for it."""
        self._pass_on(answer, self._open.pop(envelope.request_id).waiting)

    def _pass_on(self, answer: Message, waiting: deque[tuple[Behind, float]]) -> None:
        self._emit(answer)
        if isinstance(answer, Failed):
            return  # the request has ended
        while waiting:
            message, came = waiting.popleft()
            if _is_text(message):
                self._encode(message, waiting)
                return
            self._emit(_restamped(message, came))

    def _attempt(self, envelope: Envelope) -> int:
        request = self._open.get(envelope.request_id)
        return -1 if request is None else request.envelope.attempt

    def _encode(self, message: Submit | Append, behind: deque[tuple[Behind, float]]) -> None:
        started = self._start(message)
        if not isinstance(started, Future):
            self._pass_on(started, behind)
            return
        self._open[message.envelope.request_id] = _SequencedRequest(message.envelope, started, behind)
        self._watch(message, started)

    def _drop(self, envelope: Envelope) -> None:
        request = self._open.pop(envelope.request_id, None)
        if request is not None:
            request.future.cancel()


def _is_text(message: Behind) -> TypeGuard[Append]:
    """Returns True if the message has text to encode."""
    return isinstance(message, Append) and isinstance(message.piece, TextPrompt)


def _restamped(message: Behind, came: float) -> Behind:
    """Returns the message with its time left reduced by the wait since `came`."""
    if not isinstance(message, Update) or message.time_left_s is None:
        return message
    return msgspec.structs.replace(message, time_left_s=message.time_left_s - (time.monotonic() - came))
