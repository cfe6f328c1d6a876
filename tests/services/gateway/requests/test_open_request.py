"""One request: its handling of the ring's messages, and its single end."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sluice_server.engine.errors import Code, stage_lost
from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Failed, Text
from sluice_server.services.messages.work import Detokenize

ENVELOPE = Envelope(request_id="r", origin="g")


def text(first_index: int, word: str = "x", *, attempt: int = 0, last: bool = False) -> Text:
    envelope = Envelope(request_id="r", origin="g", attempt=attempt)
    record = TokenRecord(id=1, piece=word.encode())
    return Text(envelope, first_index, (record,), word, finish=FinishReason.EOS if last else None)


def opened() -> OpenRequest:
    return OpenRequest(ENVELOPE, TranslatedRequest(Detokenize(b"")), 0.0, streams=True)


def test_what_does_not_belong_is_dropped() -> None:
    request = opened()
    other = msgspec.structs.replace(text(0), output_index=1)
    came = [text(0), text(0), text(1, attempt=1), other, text(1, last=True), text(2)]
    assert [request.handle(one, 1.0) for one in came] == [
        *("", "duplicate", "stale_attempt"),
        *("unknown_output", "", "ended"),
    ]
    assert request.state is RequestStatus.FINISHED


def test_a_gap_is_told_and_ends_nothing() -> None:
    request = opened()
    assert request.handle(text(1), 1.0) == "gap"
    assert request.outcome is None and request.num_tokens == 0


@given(
    st.lists(st.sampled_from(["text", "last", "old", "gap", "failed", "cancel", "lost", "take", "stale"]), max_size=60)
)
def test_exactly_one_terminal_and_no_text_lost_or_doubled(events: list[str]) -> None:
    request = opened()
    wakes: list[object] = []
    request.delivery.on_news = lambda: wakes.append(request.outcome)
    sent, got, outcomes = [], [], []
    for event in events:
        before, index = request.outcome, request.num_tokens
        if event == "take":
            got += [one.text for one in request.delivery.take()]
        elif event in ("text", "last"):
            request.handle(text(index, str(index), last=event == "last"), 1.0)
            sent += [str(index)] if before is None else []
        elif event in ("old", "gap", "stale"):
            at = {"old": max(0, index - 1), "gap": index + 2, "stale": index}[event]
            request.handle(text(at if index or event != "old" else 1, "bad", attempt=int(event == "stale")), 1.0)
        elif event == "failed":
            request.handle(Failed(ENVELOPE, Code.INTERNAL, "ENGINE_FAULT", "m"), 1.0)
        else:
            request.end(stage_lost("engine"))
        if before is not request.outcome:
            outcomes.append(request.outcome)
    while taken := request.delivery.take():
        got += [one.text for one in taken]
    assert got == sent
    assert len(outcomes) == (request.outcome is not None)
    assert len({id(one) for one in wakes if one is not None}) <= 1
