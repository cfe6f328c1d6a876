"""The order of a generation's events, for readers with different options."""

import pytest

from sluice_server.engine.request import FinishReason, SamplingParams
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.generation.event_sequence import EventOptions, EventSequence, completed_event
from sluice_server.services.gateway.generation.events import DeltaEvent
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Admitted, TokenRecord
from sluice_server.services.messages.messages import Envelope, Text
from sluice_server.services.messages.work import Generate, Stops, TextPrompt

ENVELOPE = Envelope("r", "g", revision="r1")
LAST = FinishReason.LENGTH


def opened() -> OpenRequest:
    return OpenRequest(
        ENVELOPE, TranslatedRequest(Generate(TextPrompt("a"), SamplingParams(max_tokens=4))), 0.0, streams=True
    )


def bring(request: OpenRequest, first_index: int, word: str, finish: FinishReason | None = None) -> None:
    admitted = Admitted(num_prompt=3, num_cached=1, max_tokens=4, stops=Stops()) if not first_index else None
    records = tuple(TokenRecord(1, b"x") for _ in word)
    text = Text(ENVELOPE, first_index, records, word, admitted=admitted, finish=finish)
    assert request.handle(text, 1.0) == ""


def told(sequence: EventSequence) -> list[str]:
    """The names of all events that are ready now; texts of deltas."""
    found = []
    while (event := sequence.next()) is not None:
        is_delta = isinstance(event, DeltaEvent)
        found.append("".join(one.text for one in event.texts) if is_delta else type(event).__name__)  # type: ignore[union-attr] # by that
    return found


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("tells_prompt", [True, False])
def test_events_come_in_order_whenever_they_are_asked_for(*, is_eager: bool, tells_prompt: bool) -> None:
    request = opened()
    sequence = EventSequence(request, EventOptions(is_eager=is_eager, tells_prompt=tells_prompt))
    begin = told(sequence)
    assert begin == (["AcceptedEvent"] if is_eager else [])
    bring(request, 0, "a")
    bring(request, 1, "b")
    accepted = [] if is_eager else ["AcceptedEvent"]
    assert told(sequence) == [*accepted, *(["PromptEvent"] if tells_prompt else []), "a", "b"]
    assert not sequence.is_over
    bring(request, 2, "", LAST)
    assert told(sequence) == ["OutputFinishedEvent", "FinishedEvent"]
    assert sequence.is_over and sequence.next() is None


def test_a_reader_that_comes_back_is_told_what_it_lacks() -> None:
    request = opened()
    request.delivery.history = History(10, 1000)
    for at, word in enumerate("abc"):
        bring(request, at, word)
        request.delivery.take()
    bring(request, 3, "d", LAST)
    sequence = EventSequence(request, EventOptions(is_eager=False, tells_prompt=False, after_seq=2))
    assert told(sequence) == ["AcceptedEvent", "c", "d", "OutputFinishedEvent", "FinishedEvent"]


def test_a_whole_generation_has_all_of_each_output() -> None:
    request = opened()
    bring(request, 0, "a")
    bring(request, 1, "b", LAST)
    completed = completed_event(request)
    (output,) = completed.outputs
    assert ("".join(one.text for one in output.texts), output.num_tokens, completed.prompt) == ("ab", 2, None)
    assert (completed.accepted.generation_id, completed.used.num_prompt) == ("r.g", 3)
