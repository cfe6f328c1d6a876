"""What a request asks for by the time it is sent again."""

from engine.request import FinishReason, SamplingParams
from services.gateway.contract.translate import TranslatedRequest
from services.gateway.requests.open_requests import OpenRequest
from services.gateway.requests.replay import cancels, work_now
from services.messages.details import TokenRecord
from services.messages.messages import Append, Cancel, CloseInput, Envelope, Grant, Text, Update
from services.messages.work import Generate, Scheduling, TextPrompt, Tokenize, TokenPrompt

ENVELOPE = Envelope("r", "g")


def opened(*, num_outputs: int = 1, **scheduling: object) -> OpenRequest:
    held = Scheduling(**scheduling)  # type: ignore[arg-type]  # fields of it
    work = Generate(TextPrompt("a"), SamplingParams(max_tokens=5, n=num_outputs), scheduling=held)
    return OpenRequest(ENVELOPE, TranslatedRequest(work, num_outputs=num_outputs), 0.0)


def token(output: int, finish: FinishReason | None = None) -> Text:
    return Text(ENVELOPE, 0, (TokenRecord(1, b"x"),), "x", output, finish=finish)


def test_a_request_that_nobody_changed_asks_the_same() -> None:
    request = opened()
    assert work_now(request) == request.asked.work
    other = OpenRequest(ENVELOPE, TranslatedRequest(Tokenize(TextPrompt("a"))), 0.0)
    assert work_now(other) is other.asked.work


def test_every_change_is_part_of_the_work() -> None:
    request = opened(is_open=True, credit=4)
    request.allowed = 4
    for change in (
        Append(ENVELOPE, TextPrompt("b")),
        Update(ENVELOPE, max_tokens=9),
        Append(ENVELOPE, TokenPrompt(b"\1\0\0\0")),
        Update(ENVELOPE, priority=3),
        Grant(ENVELOPE, 2),
    ):
        request.record(change)
    request.allowed += 2
    work = work_now(request)
    assert isinstance(work, Generate)
    assert work.more == (TextPrompt("b"), TokenPrompt(b"\1\0\0\0"))
    assert (work.params.max_tokens, work.scheduling) == (9, Scheduling(priority=3, credit=6, is_open=True))
    request.record(CloseInput(ENVELOPE))
    request.receive(token(0), 0.0)
    work = work_now(request)
    assert isinstance(work, Generate)
    assert work.scheduling == Scheduling(priority=3, credit=5)  # one of the six was used


def test_outputs_that_were_to_end_are_ended_again() -> None:
    request = opened(num_outputs=3)
    for index in (2, 0, 2):
        request.record(Cancel(ENVELOPE, index))
    request.receive(token(0, FinishReason.CANCELLED), 0.0)
    request.send_again(0.0)
    assert cancels(request) == [Cancel(request.envelope, 2)]
    assert request.envelope.attempt == 1


def test_a_new_deadline_counts_from_when_it_was_set() -> None:
    request = opened()
    request.set_time_left(30.0, 10.0)
    request.send_again(15.0)
    assert request.envelope.time_left_s == 25.0
