"""The queue of a reader: which messages are sent together, which reader is woken, and when a reader is dropped."""

import msgspec
import pytest

from sluice_server.engine.errors import ServiceError, cancelled
from sluice_server.services.gateway.requests.delivery import Delivery
from sluice_server.services.gateway.requests.deltas import MAX_DELTA_BYTES
from sluice_server.services.gateway.requests.history import History, num_bytes
from sluice_server.services.gateway.requests.progress import SlotLimits, WriteProgress
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Text

SLOT = SlotLimits(stall_timeout_s=1.0, max_deltas=3, max_bytes=1000)


def text(first_index: int, word: str = "x") -> Text:
    return Text(Envelope("r", "g"), first_index, (TokenRecord(id=1, piece=word.encode()),), word)


def test_the_first_leaves_alone_and_the_rest_together() -> None:
    delivery = Delivery(streams=True)
    for at in range(4):
        delivery.add(text(at, str(at)))
    taken = [[one.text for one in delivery.take()] for _ in range(3)]
    assert taken == [["0"], ["1", "2", "3"], []]
    assert delivery.last_seq == 2


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_what_waits_leaves_in_deltas_that_any_client_receives(num_outputs: int) -> None:
    delivery = Delivery(streams=True, num_outputs=num_outputs)
    words = [str(at % 10) * 100_000 for at in range(12)]
    for at, word in enumerate(words):
        for index in range(num_outputs):
            delivery.add(msgspec.structs.replace(text(at, word), output_index=index))
    got: dict[int, str] = {}
    while taken := delivery.take():
        assert len({one.output_index for one in taken}) == 1
        assert sum(map(num_bytes, taken)) <= MAX_DELTA_BYTES
        index = taken[0].output_index
        got[index] = got.get(index, "") + "".join(one.text for one in taken)
    assert got == dict.fromkeys(range(num_outputs), "".join(words))
    assert not delivery.is_stuck(SLOT, has_ended=False) and delivery.last_seq >= 5 * num_outputs


def test_all_of_one_output_is_taken_at_once() -> None:
    delivery = Delivery(streams=False, num_outputs=2)
    for at, index in enumerate((0, 1, 0)):
        delivery.add(msgspec.structs.replace(text(at, str(at)), output_index=index))
    assert [[one.text for one in delivery.take_all(index)] for index in (0, 1, 0)] == [["0", "2"], ["1"], []]


def test_a_reader_is_stuck_by_time_or_by_what_waits_and_never_without_news() -> None:
    delivery = Delivery(streams=True)

    def is_stuck_after(seconds: float, *, has_ended: bool = False) -> bool:
        delivery.progress.watch(seconds)
        return delivery.is_stuck(SLOT, has_ended=has_ended)

    delivery.progress.begin_write()
    assert not is_stuck_after(0.4)
    assert [is_stuck_after(0.6) for _ in range(3)] == [False, False, False]
    assert is_stuck_after(0.1, has_ended=True)
    delivery.add(text(0))
    assert is_stuck_after(0.1)
    delivery.progress.end_write()
    delivery.progress.begin_write()
    assert not is_stuck_after(5.0)
    assert not is_stuck_after(0.1)
    for at in range(1, 4):
        delivery.add(text(at))
    assert is_stuck_after(0.1)


def test_only_a_reader_of_text_as_it_comes_is_woken_for_it() -> None:
    woken: list[bool] = []
    for streams in (True, False):
        delivery = Delivery(streams=streams)
        delivery.attach(lambda streams=streams: woken.append(streams), lambda error: None, WriteProgress())  # type: ignore[misc] # of a default
        delivery.announce()
    assert woken == [True]


def test_a_reader_that_is_let_go_is_told_why_and_one_that_left_is_not() -> None:
    delivery, told, error = Delivery(streams=True), list[ServiceError](), cancelled()
    delivery.attach(lambda: None, told.append, WriteProgress())
    delivery.break_off(error)
    assert told == [error] and delivery.is_broken_off
    delivery.detach()
    assert not delivery.is_broken_off
    delivery.break_off(error)
    assert told == [error]


def test_what_is_taken_goes_into_the_history() -> None:
    delivery = Delivery(streams=True, last_seq=4)
    delivery.history = History(10, 1000, after_seq=4)
    delivery.add(text(0, "a"))
    delivery.take()
    assert [(seq, [one.text for one in texts]) for seq, texts in delivery.history.since(4)] == [(5, ["a"])]
