import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Code, stage_lost
from engine.request import FinishReason
from services.gateway.contract.translate import TranslatedRequest
from services.gateway.requests.deltas import MAX_DELTA_BYTES
from services.gateway.requests.history import num_bytes
from services.gateway.requests.open_requests import OpenRequest, RequestStatus
from services.gateway.requests.reader import SlotLimits
from services.gateway.requests.registry import OpenRequests
from services.messages.details import TokenRecord
from services.messages.messages import CloseInput, Envelope, Failed, Grant, Text
from services.messages.work import Detokenize

ENVELOPE = Envelope(request_id="r", origin="g")
SLOT = SlotLimits(stall_timeout_s=1.0, max_deltas=3, max_bytes=1000)


def text(first_index: int, word: str = "x", *, attempt: int = 0, name: str = "r", last: bool = False) -> Text:
    envelope = Envelope(request_id=name, origin="g", attempt=attempt)
    record = TokenRecord(id=1, piece=word.encode())
    return Text(envelope, first_index, (record,), word, finish=FinishReason.EOS if last else None)


def opened() -> tuple[OpenRequests, OpenRequest, list[str]]:
    dropped: list[str] = []
    table = OpenRequests(dropped.append, num_remembered=2)
    request = OpenRequest(ENVELOPE, TranslatedRequest(Detokenize(b"")), 0.0, streams=True)
    table.add(request)
    return table, request, dropped


def test_the_first_leaves_alone_and_the_rest_together() -> None:
    table, request, _ = opened()
    for at in range(4):
        table.deliver(text(at, str(at)), 1.0)
    taken = [[one.text for one in request.take()] for _ in range(3)]
    assert taken == [["0"], ["1", "2", "3"], []]
    assert request.last_seq == 2


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_what_waits_leaves_in_deltas_that_any_client_receives(num_outputs: int) -> None:
    request = OpenRequest(ENVELOPE, TranslatedRequest(Detokenize(b""), num_outputs=num_outputs), 0.0, streams=True)
    words = [str(at % 10) * 100_000 for at in range(12)]
    for at, word in enumerate(words):
        for index in range(num_outputs):
            request.receive(msgspec.structs.replace(text(at, word), output_index=index), 1.0)
    got: dict[int, str] = {}
    while taken := request.take():
        assert len({one.output_index for one in taken}) == 1
        assert sum(map(num_bytes, taken)) <= MAX_DELTA_BYTES
        index = taken[0].output_index
        got[index] = got.get(index, "") + "".join(one.text for one in taken)
    assert got == dict.fromkeys(range(num_outputs), "".join(words))
    assert not request.is_stuck(SLOT) and request.last_seq >= 5 * num_outputs


def test_what_does_not_belong_is_dropped_and_counted() -> None:
    table, request, dropped = opened()
    table.deliver(text(0), 1.0)
    table.deliver(text(0), 1.0)
    table.deliver(text(1, attempt=1), 1.0)
    table.deliver(text(0, name="other"), 1.0)
    table.deliver(text(1, last=True), 1.0)
    table.deliver(text(2), 1.0)
    assert dropped == ["duplicate", "stale_attempt", "unknown", "ended"]
    assert request.state is RequestStatus.FINISHED


def test_a_gap_is_told_and_ends_nothing() -> None:
    table, request, dropped = opened()
    assert table.deliver(text(1), 1.0) == "gap"
    assert dropped == ["gap"]
    assert request.outcome is None and request.num_tokens == 0


def test_how_requests_ended_is_remembered_for_a_while() -> None:
    table, request, _ = opened()
    request.end(stage_lost("engine"))
    assert table.remove(request) and not table.remove(request)
    assert table.state("r", "") is RequestStatus.FAILED
    for name in ("a", "b"):
        other = OpenRequest(Envelope(request_id=name, origin="g"), TranslatedRequest(Detokenize(b"")), 0.0)
        table.add(other)
        table.remove(other)
    assert table.state("r", "") is None


def test_a_reader_is_stuck_by_time_or_by_what_waits_and_never_without_news() -> None:
    table, request, _ = opened()

    def is_stuck_after(seconds: float) -> bool:
        request.reader.watch(seconds)
        return request.is_stuck(SLOT)

    request.reader.begin_write()
    assert not is_stuck_after(0.4)
    assert [is_stuck_after(0.6) for _ in range(3)] == [False, False, False]
    table.deliver(text(0), 1.0)
    assert is_stuck_after(0.1)
    request.reader.end_write()
    request.reader.begin_write()
    assert not is_stuck_after(5.0)
    assert not is_stuck_after(0.1)
    for at in range(1, 4):
        table.deliver(text(at), 1.0)
    assert is_stuck_after(0.1)


def test_what_the_client_said_is_kept_in_order_and_grants_in_a_row_are_one() -> None:
    _, request, _ = opened()
    for change in (Grant(ENVELOPE, 1), Grant(ENVELOPE, 2), CloseInput(ENVELOPE), Grant(ENVELOPE, 4)):
        request.record(change)
    assert request.changes == [Grant(ENVELOPE, 3), CloseInput(ENVELOPE), Grant(ENVELOPE, 4)]


@given(
    st.lists(st.sampled_from(["text", "last", "old", "gap", "failed", "cancel", "lost", "take", "stale"]), max_size=60)
)
def test_exactly_one_terminal_and_no_text_lost_or_doubled(events: list[str]) -> None:
    table, request, _ = opened()
    wakes: list[object] = []
    request.on_news = lambda: wakes.append(request.outcome)
    sent, got, outcomes = [], [], []
    for event in events:
        before, index = request.outcome, request.num_tokens
        if event == "take":
            got += [one.text for one in request.take()]
        elif event in ("text", "last"):
            table.deliver(text(index, str(index), last=event == "last"), 1.0)
            sent += [str(index)] if before is None else []
        elif event in ("old", "gap", "stale"):
            at = {"old": max(0, index - 1), "gap": index + 2, "stale": index}[event]
            table.deliver(text(at if index or event != "old" else 1, "bad", attempt=int(event == "stale")), 1.0)
        elif event == "failed":
            table.deliver(Failed(ENVELOPE, Code.INTERNAL, "ENGINE_FAULT", "m"), 1.0)
        else:
            request.end(stage_lost("engine"))
        if before is not request.outcome:
            outcomes.append(request.outcome)
    while taken := request.take():
        got += [one.text for one in taken]
    assert got == sent
    assert len(outcomes) == (request.outcome is not None)
    assert len({id(one) for one in wakes if one is not None}) <= 1
