"""The events of one generation in order: accepted, prompt, deltas and the ends of outputs, finished.

Returns one event at a time, the same for every call that streams. The error of a failed generation is not an event
here: the caller reports it. Pure.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

from sluice.v1 import types_pb2

from sluice_server.services.gateway.generation.events import (
    AcceptedEvent,
    CompletedEvent,
    CompletedOutput,
    DeltaEvent,
    FinishedEvent,
    OutputFinishedEvent,
    PromptEvent,
    StreamEvent,
)
from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.deltas import has_content
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Text
from sluice_server.services.messages.work import Generate


@dataclasses.dataclass(frozen=True, slots=True)
class EventOptions:
    """What a reader asks for.

    Attributes:
        is_eager: the accepted event comes at once, not when the engine has admitted the request.
        tells_prompt: the prompt event comes before the first delta.
        after_seq: the reader has all deltas up to this number.
    """

    is_eager: bool
    tells_prompt: bool
    after_seq: int = 0


class EventSequence:
    """The events of one request for one reader."""

    def __init__(self, request: OpenRequest, options: EventOptions) -> None:
        """Raises ServiceError RESUME_WINDOW_EXPIRED or INVALID_ARGUMENT if deltas behind `after_seq` are missing."""
        self.is_over = False  # the last event has been returned
        self._request = request
        self._options = options
        self._is_accepted = False
        self._tells_prompt = options.tells_prompt
        self._told_before: deque[tuple[int, Sequence[Text]]] = deque()  # kept deltas that this reader lacks
        if request.delivery.history is not None:
            self._told_before.extend(request.delivery.history.since(options.after_seq))
        self._ended: Text | None = None  # last message of an output whose end event is due

    def next(self) -> StreamEvent | None:
        """Returns the next event; None while there is none, after the last, or when a failed generation has no more."""
        request = self._request
        if not self._is_accepted:
            if is_unbound(request.asked) or not request.envelope.revision:
                return None  # it waits for its adapter, or for a model that has not served yet
            if not self._options.is_eager and request.accounting.admitted is None:
                return None
            self._is_accepted = True
            return accepted_event(request)
        if self._tells_prompt and self._knows_prompt():
            self._tells_prompt = False
            return prompt_event(request)
        if self._ended is not None:
            return self._end_output(self._ended)
        if self._told_before:
            return self._delta(*self._told_before.popleft())
        if not self._tells_prompt or request.outcome is not None:
            texts = request.delivery.take()
            if texts:
                return self._delta(request.delivery.last_seq, texts)
        if not self.is_over and isinstance(request.outcome, Text):
            self.is_over = True
            return FinishedEvent(
                request.generation_id, request.delivery.last_seq, request.used, effective_params(request)
            )
        return None

    def _knows_prompt(self) -> bool:
        request = self._request
        is_echoed = request.prompt is not None or not request.asked.tells_prompt
        return request.accounting.admitted is not None and (is_echoed or request.outcome is not None)

    def _delta(self, seq: int, texts: Sequence[Text]) -> StreamEvent | None:
        last = texts[-1]
        if not has_content(texts) or seq <= self._options.after_seq:
            return self._end_output(last) if last.finish is not None else self.next()
        if last.finish is not None:
            self._ended = last
        request = self._request
        return DeltaEvent(request.generation_id, seq, texts, request.asked.token_records)

    def _end_output(self, last: Text) -> OutputFinishedEvent:
        self._ended = None
        num_tokens = self._request.outputs[last.output_index].num_tokens
        return OutputFinishedEvent(self._request.generation_id, last, num_tokens)


def accepted_event(request: OpenRequest) -> AcceptedEvent:
    """Returns the event of an admitted request."""
    envelope, params = request.envelope, effective_params(request)
    num_prompt, num_cached = request.accounting.num_prompt, request.accounting.num_cached
    adapter = request.asked.adapter, envelope.adapter
    where = request.generation_id, request.asked.model or envelope.model, envelope.revision
    return AcceptedEvent(*where, params, num_prompt, num_cached, *adapter)


def prompt_event(request: OpenRequest) -> PromptEvent:
    """Returns the prompt event, with what is known of the prompt so far."""
    account = request.accounting
    return PromptEvent(request.generation_id, account.num_prompt, account.num_cached, request.prompt)


def completed_event(request: OpenRequest) -> CompletedEvent:
    """Returns a generation that has finished successfully as one event."""
    outputs = []
    for index, output in enumerate(request.outputs):
        assert output.last is not None, "the request has ended without an error"
        outputs.append(CompletedOutput(request.delivery.take_all(index), output.last, output.num_tokens))
    prompt = prompt_event(request) if request.asked.tells_prompt else None
    return CompletedEvent(accepted_event(request), prompt, outputs, request.used, request.asked.token_records)


def effective_params(request: OpenRequest) -> types_pb2.EffectiveParams | None:
    """Returns the parameters in effect; `max_tokens` as the engine settled it, before that as requested."""
    params, work = request.asked.effective, request.asked.work
    max_tokens = request.max_tokens or (work.params.max_tokens if isinstance(work, Generate) else 0)
    if params is not None and max_tokens:
        params.sampling.max_tokens = max_tokens
    return params
