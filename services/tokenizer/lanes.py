"""The order of each request's messages while something of it is being encoded: what comes behind waits for it.

Encoding runs elsewhere and ends when it likes; per request everything leaves in the order in which it came. Knows no
text and no thread: `start` begins an encoding and gives its future.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeGuard

import msgspec

from services.messages import Append, Cancel, Change, Envelope, Failed, Message, Submit, Update
from services.tokenizer.answers import Made
from services.work import TextPrompt

Behind = Change | Cancel  # a Cancel of one output
Start = Callable[[Submit | Append], Future[Made]]
Watch = Callable[[Submit | Append, Future[Made]], None]


@dataclasses.dataclass(slots=True)
class _Lane:
    """One request of which something is being encoded, and what has come behind that."""

    envelope: Envelope
    future: Future[Made]
    waiting: deque[tuple[Behind, float]]  # and when it came


class Lanes:
    """Every request that is being encoded."""

    def __init__(self, start: Start, watch: Watch, emit: Callable[[Message], None]) -> None:
        """`start` begins an encoding; `watch` has `finish` called when it has ended, perhaps at once."""
        self._start = start
        self._watch = watch
        self._emit = emit
        self._lanes: dict[str, _Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def begin(self, submit: Submit) -> None:
        """A request; it takes the place of an earlier attempt, and comes too late behind a later one."""
        envelope = submit.envelope
        if envelope.attempt > self._attempt(envelope):
            self._drop(envelope)
            self._encode(submit, deque())

    def follow(self, message: Behind) -> None:
        """A message behind its request: passes at once if nothing of that is being encoded."""
        lane = self._lanes.get(message.envelope.request_id)
        if lane is None and _is_text(message):
            self._encode(message, deque())
        elif lane is None:
            self._emit(message)
        elif lane.envelope.attempt == message.envelope.attempt:
            lane.waiting.append((message, time.monotonic()))

    def cancel(self, envelope: Envelope) -> None:
        """Give up what is being encoded of a request, and what waits behind it."""
        if envelope.attempt >= self._attempt(envelope):
            self._drop(envelope)

    def drop(self, has_ended: Callable[[Envelope], bool]) -> None:
        """Give up what is being encoded for requests that have ended."""
        for envelope in [lane.envelope for lane in self._lanes.values() if has_ended(lane.envelope)]:
            self._drop(envelope)

    def is_current(self, envelope: Envelope, future: Future[Made]) -> bool:
        """Whether somebody still waits for what an encoding made."""
        lane = self._lanes.get(envelope.request_id)
        return lane is not None and lane.future is future

    def finish(self, envelope: Envelope, answer: Message) -> None:
        """The current encoding of a request has made `answer`: it leaves, and what waited behind it."""
        lane = self._lanes.pop(envelope.request_id)
        self._emit(answer)
        if isinstance(answer, Failed):
            return  # the request has ended
        while lane.waiting:
            message, came = lane.waiting.popleft()
            if _is_text(message):
                self._encode(message, lane.waiting)
                return
            self._emit(_restamped(message, came))

    def _attempt(self, envelope: Envelope) -> int:
        lane = self._lanes.get(envelope.request_id)
        return -1 if lane is None else lane.envelope.attempt

    def _encode(self, message: Submit | Append, behind: deque[tuple[Behind, float]]) -> None:
        future = self._start(message)
        self._lanes[message.envelope.request_id] = _Lane(message.envelope, future, behind)
        self._watch(message, future)

    def _drop(self, envelope: Envelope) -> None:
        lane = self._lanes.pop(envelope.request_id, None)
        if lane is not None:
            lane.future.cancel()


def _is_text(message: Behind) -> TypeGuard[Append]:
    """Whether there is something to encode in it."""
    return isinstance(message, Append) and isinstance(message.piece, TextPrompt)


def _restamped(message: Behind, came: float) -> Behind:
    """The message, less the time that it has waited since `came`."""
    if not isinstance(message, Update) or message.time_left_s is None:
        return message
    return msgspec.structs.replace(message, time_left_s=message.time_left_s - (time.monotonic() - came))
