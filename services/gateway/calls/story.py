"""What one generation tells its client, in order: accepted, prompt_info, deltas and output_finished, finished.

One thing at a time, whenever there is something: the same for every RPC that streams. Where it goes, and how a
generation that failed ends, is the caller's.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sluice.v1 import inference_pb2

from services.gateway.requests import answers
from services.gateway.requests.deltas import has_content
from services.gateway.requests.open_requests import OpenRequest
from services.messages.messages import Text

Event = TypeVar(
    "Event",
    bound=inference_pb2.StreamGenerateResponse | inference_pb2.ConverseResponse | inference_pb2.ResumeGenerateResponse,
)


@dataclasses.dataclass(frozen=True, slots=True)
class EventFormat:
    """How it is told.

    Attributes:
        is_eager: accepted comes at once, not when the engine has seen the request.
        tells_prompt: prompt_info comes before the first delta.
        after_seq: the reader has all deltas up to this one.
    """

    is_eager: bool
    tells_prompt: bool
    after_seq: int = 0


class EventSequence(Generic[Event]):
    """The events of one request for one reader."""

    def __init__(self, request: OpenRequest, new: Callable[[], Event], manner: EventFormat) -> None:
        """`new` makes an empty event. Raises ServiceError when what comes after `after_seq` is not there."""
        self.is_over = False  # the last event is out
        self._request = request
        self._new = new
        self._manner = manner
        self._is_accepted = False
        self._tells_prompt = manner.tells_prompt
        self._told_before: deque[tuple[int, Sequence[Text]]] = deque()  # that this reader lacks
        if request.history is not None:
            self._told_before.extend(request.history.since(manner.after_seq))
        self._ended: Text | None = None  # an output whose end is to be told

    def next(self) -> Event | None:
        """The next event; None while there is none, after the last, and when all is told of one that failed."""
        if not self._is_accepted:
            return self._accept()
        if self._tells_prompt and self._knows_prompt():
            self._tells_prompt = False
            event = self._new()
            event.prompt_info.CopyFrom(answers.prompt_info(self._request))
            return event
        if self._ended is not None:
            return self._end_output(self._ended)
        if self._told_before:
            return self._tell(*self._told_before.popleft())
        if not self._tells_prompt or self._request.outcome is not None:
            texts = self._request.take()
            if texts:
                return self._tell(self._request.last_seq, texts)
        if not self.is_over and isinstance(self._request.outcome, Text):
            self.is_over = True
            event = self._new()
            event.finished.CopyFrom(answers.finished(self._request))
            return event
        return None

    def _accept(self) -> Event | None:
        if not self._manner.is_eager and self._request.admitted is None:
            return None
        self._is_accepted = True
        event = self._new()
        event.accepted.CopyFrom(answers.accepted(self._request))
        return event

    def _knows_prompt(self) -> bool:
        request = self._request
        is_echoed = request.prompt is not None or not request.asked.tells_prompt
        return request.admitted is not None and (is_echoed or request.outcome is not None)

    def _tell(self, seq: int, texts: Sequence[Text]) -> Event | None:
        last = texts[-1]
        if not has_content(texts) or seq <= self._manner.after_seq:
            return self._end_output(last) if last.finish is not None else self.next()
        if last.finish is not None:
            self._ended = last
        event = self._new()
        answers.fill_delta(event.delta, self._request, seq, texts)
        return event

    def _end_output(self, last: Text) -> Event:
        self._ended = None
        event = self._new()
        event.output_finished.CopyFrom(answers.output_finished(self._request, last))
        return event
