"""The kept history of a generation's events."""

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Text


def texts(word: str, *, last: bool = False) -> list[Text]:

    finish = FinishReason.LENGTH if last else None
    return [Text(Envelope("r", "g"), 0, (TokenRecord(1, b"x"),), word, finish=finish)]


def test_a_history_is_bounded_by_bytes_and_keeps_every_end() -> None:
    history = History(max_deltas=100, max_bytes=200)
    for seq in range(1, 6):
        history.add(seq, texts("x" * 10, last=seq == 1))
    assert [seq for seq, _ in history.since(3)] == [4, 5]
    with pytest.raises(ServiceError) as caught:
        history.since(2)
    assert caught.value.details == {"oldest_seq": "4"}
    many = History(max_deltas=1, max_bytes=200)
    many.add(1, texts("a", last=True))
    many.add(2, texts("b"))
    assert [(seq, told[0].text) for seq, told in many.since(1)] == [(1, "a"), (2, "b")]
