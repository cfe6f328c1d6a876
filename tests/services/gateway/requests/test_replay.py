"""The request that is sent again after a loss, with the progress so far."""

from sluice_server.engine.request import FinishReason, SamplingParams
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.replay import Replay
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Append, Cancel, CloseInput, Envelope, Grant, Text, Update
from sluice_server.services.messages.work import Generate, Scheduling, TextPrompt, Tokenize, TokenPrompt

ENVELOPE = Envelope("r", "g")


def opened(*, num_outputs: int = 1, **scheduling: object) -> OpenRequest:
    held = Scheduling(**scheduling)  # type: ignore[arg-type]  # fields of it
    work = Generate(TextPrompt("a"), SamplingParams(max_tokens=5, n=num_outputs), scheduling=held)
    return OpenRequest(ENVELOPE, TranslatedRequest(work, num_outputs=num_outputs), 0.0)


def token(output: int, finish: FinishReason | None = None) -> Text:
    return Text(ENVELOPE, 0, (TokenRecord(1, b"x"),), "x", output, finish=finish)


def test_an_unchanged_request_asks_the_same() -> None:
    request = opened()
    assert request.work_now() == request.asked.work
    other = OpenRequest(ENVELOPE, TranslatedRequest(Tokenize(TextPrompt("a"))), 0.0)
    assert other.work_now() is other.asked.work


def test_every_change_is_part_of_the_work() -> None:
    request = opened(is_open=True, credit=4)
    for change in (
        Append(ENVELOPE, TextPrompt("b")),
        Update(ENVELOPE, max_tokens=9),
        Append(ENVELOPE, TokenPrompt(b"\1\0\0\0")),
        Update(ENVELOPE, priority=3),
        Grant(ENVELOPE, 2),
    ):
        request.replay.record(change)
    request.credit.grant(2)
    work = request.work_now()
    assert isinstance(work, Generate)
    assert work.more == (TextPrompt("b"), TokenPrompt(b"\1\0\0\0"))
    assert (work.params.max_tokens, work.scheduling) == (9, Scheduling(priority=3, credit=6, is_open=True))
    request.replay.record(CloseInput(ENVELOPE))
    request.handle(token(0), 0.0)
    work = request.work_now()
    assert isinstance(work, Generate)
    assert work.scheduling == Scheduling(priority=3, credit=5)  # one of the six was used


def test_outputs_that_were_to_end_are_ended_again() -> None:
    request = opened(num_outputs=3)
    for index in (2, 0, 2):
        request.replay.record(Cancel(ENVELOPE, index))
    request.handle(token(0, FinishReason.CANCELLED), 0.0)
    request.send_again(0.0, "e")
    assert request.cancels() == [Cancel(request.envelope, 2)]
    assert request.envelope.attempt == 1


def test_a_new_deadline_counts_from_when_it_was_set() -> None:
    request = opened()
    request.replay.set_time_left(30.0, 10.0)
    request.send_again(15.0, "e")
    assert request.envelope.time_left_s == 25.0


def test_what_the_client_said_is_kept_in_order_and_grants_in_a_row_are_one() -> None:
    replay = Replay(0.0, None, 0)
    said = (Grant(ENVELOPE, 1), Grant(ENVELOPE, 2), CloseInput(ENVELOPE), Grant(ENVELOPE, 4))
    told = [replay.record(change) for change in said]
    assert [one.index for one in told if not isinstance(one, Cancel)] == [0, 1, 2, 3]
    assert replay.changes == [Grant(ENVELOPE, 3), CloseInput(ENVELOPE, index=2), Grant(ENVELOPE, 4, index=3)]


def test_attempts_that_bring_nothing_are_counted_in_a_row() -> None:
    replay, envelope = Replay(0.0, None, 0), ENVELOPE
    for num_tokens, num_futile in ((0, 1), (0, 2), (3, 0), (3, 1)):
        assert replay.is_unproven(num_tokens) is bool(num_futile)
        envelope = replay.next_attempt(envelope, num_tokens, 1.0, "e")
        assert replay.num_futile == num_futile
    assert envelope.attempt == 4 and envelope.time_left_s is None


def test_changes_are_counted_anew_in_each_attempt() -> None:
    replay = Replay(0.0, None, 0)
    replay.record(CloseInput(ENVELOPE))
    envelope = replay.next_attempt(ENVELOPE, 0, 1.0, "e")
    assert replay.record(Grant(envelope, 1)) == Grant(envelope, 1, index=0)
