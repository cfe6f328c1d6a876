import pytest

from sluice_server.services.gateway.connections.screen import (
    BURST,
    MOST_LOOKS,
    MOST_RESETS,
    PER_SECOND,
    Held,
    Screen,
    held,
)
from tests.services.gateway.raw_http2 import PREFACE, RST_STREAM, SETTINGS, frame, headers

BAD, GOOD = "10.0.0.1", "10.0.0.2"
BEGIN = PREFACE + frame(SETTINGS, 0, 0)


def opened_and_reset(num: int) -> bytes:
    return b"".join(headers(one, "Embed") + frame(RST_STREAM, 0, one, b"1234") for one in range(1, 2 * num, 2))


@pytest.mark.parametrize("num", [0, 1, MOST_RESETS, MOST_RESETS + 1])
def test_resets_are_counted_in_what_a_connection_sends_first(num: int) -> None:
    data = BEGIN + opened_and_reset(num)
    assert held((BAD, 1), data) == Held((BAD, 1), len(data), num, num)
    assert held((BAD, 1), data + headers(101, "Embed")[:5]).num_calls == num  # the last frame has not come whole


def test_counting_ends_when_there_are_too_many() -> None:
    assert held((BAD, 1), BEGIN + opened_and_reset(500)).num_resets == MOST_RESETS + 1


def test_what_is_no_plain_http2_counts_as_one_call() -> None:
    for data in (b"\x16\x03\x01" + opened_and_reset(50), PREFACE[:10]):
        assert held((BAD, 1), data) == Held((BAD, 1), len(data), 1, 0)


def test_other_addresses_go_on_at_once_also_if_they_have_said_nothing() -> None:
    screen = Screen(lambda host: host == BAD)
    assert screen.judge([Held((GOOD, 1), 0, 1, 0), Held((GOOD, 2), 9000, 400, 400)], 0.0) == (
        [(GOOD, 1), (GOOD, 2)],
        [],
    )


def test_one_of_an_address_on_probation_that_begins_with_resets_is_cut() -> None:
    screen = Screen(lambda host: host == BAD)
    assert screen.judge([Held((BAD, 1), 9000, 17, MOST_RESETS + 1)], 0.0) == ([], [(BAD, 1)])


def test_another_of_it_goes_on_when_it_has_said_what_it_had_to_say() -> None:
    screen = Screen(lambda host: host == BAD)
    assert screen.judge([Held((BAD, 1), 0, 1, 0)], 0.0) == ([], [])
    assert screen.judge([Held((BAD, 1), 0, 1, 0)], 0.0) == ([], [])  # nothing yet
    assert screen.judge([Held((BAD, 1), 50, 1, 0)], 0.0) == ([], [])  # there may be more
    assert screen.judge([Held((BAD, 1), 50, 1, MOST_RESETS)], 0.0) == ([(BAD, 1)], [])


def test_another_of_it_that_only_begins_is_waited_for_a_while() -> None:
    screen = Screen(lambda host: host == BAD)
    looks = [screen.judge([Held((BAD, 1), 50, 0, 0)], 0.0)[0] for _ in range(MOST_LOOKS)]
    assert looks == [*[[]] * (MOST_LOOKS - 1), [(BAD, 1)]]


def test_one_that_sends_much_does_not_wait_for_its_end() -> None:
    screen = Screen(lambda host: host == BAD)
    looks = [screen.judge([Held((BAD, 1), 1000 * (1 + look), 1, 0)], 0.0)[0] for look in range(MOST_LOOKS)]
    assert looks == [*[[]] * (MOST_LOOKS - 1), [(BAD, 1)]]


def test_so_many_of_an_address_on_probation_go_on_a_second() -> None:
    screen = Screen(lambda host: host == BAD)
    held = [Held((BAD, number), 50, 1, 0) for number in range(100)]
    screen.judge(held, 0.0)
    gone, _ = screen.judge(held, 0.0)
    assert len(gone) == BURST
    rest = [one for one in held if one.peer not in gone]
    assert screen.judge(rest, 0.0) == ([], [])
    assert len(screen.judge(rest, 1.0)[0]) == PER_SECOND


def test_of_those_that_wait_the_first_to_come_goes_first() -> None:
    screen = Screen(lambda host: host == BAD)
    first = [Held((BAD, number), 50, 1, 0) for number in range(int(BURST) + 3)]
    screen.judge(first, 0.0)
    gone = screen.judge(first, 0.0)[0]
    rest = [one for one in first if one.peer not in gone]
    late = [Held((BAD, 1000 + number), 50, 1, 0) for number in range(20)]
    screen.judge([*late, *rest], 0.0)
    assert screen.judge([*late, *rest], 3 / PER_SECOND)[0] == [one.peer for one in rest]
