"""What one generation tells its client, in order: accepted, prompt_info, deltas and output_finished, finished.

One thing at a time, whenever there is something: the same for every RPC that streams. Where it goes, and how a
generation that failed ends, is the caller's.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from sluice.v1 import inference_pb2

from services.gateway import answers
from services.gateway.open_requests import OpenRequest, has_content
from services.messages import Text

Event = TypeVar("Event", bound=inference_pb2.StreamGenerateResponse | inference_pb2.ConverseResponse)


class Story(Generic[Event]):
    """The events of one request."""

    def __init__(self, request: OpenRequest, new: Callable[[], Event], *, is_eager: bool) -> None:
        """`new` makes an empty event. Eager: accepted at once, not when the engine has seen it; the prompt is told."""
        self.is_over = False  # the last event is out
        self._request = request
        self._new = new
        self._is_accepted = False
        self._waits_for_engine = not is_eager
        self._tells_prompt = is_eager or request.asked.echo
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
        texts = self._request.take() if not self._tells_prompt or self._request.outcome is not None else []
        if texts:
            return self._tell(texts)
        if not self.is_over and isinstance(self._request.outcome, Text):
            self.is_over = True
            event = self._new()
            event.finished.CopyFrom(answers.finished(self._request))
            return event
        return None

    def _accept(self) -> Event | None:
        if self._waits_for_engine and self._request.admitted is None:
            return None
        self._is_accepted = True
        event = self._new()
        event.accepted.CopyFrom(answers.accepted(self._request))
        return event

    def _knows_prompt(self) -> bool:
        request = self._request
        is_echoed = request.prompt is not None or not request.asked.echo
        return request.admitted is not None and (is_echoed or request.outcome is not None)

    def _tell(self, texts: list[Text]) -> Event:
        last = texts[-1]
        if not has_content(texts):
            return self._end_output(last)
        if last.finish is not None:
            self._ended = last
        event = self._new()
        answers.fill_delta(event.delta, self._request, texts)
        return event

    def _end_output(self, last: Text) -> Event:
        self._ended = None
        event = self._new()
        event.output_finished.CopyFrom(answers.output_finished(self._request, last))
        return event
