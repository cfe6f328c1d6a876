from sluice_server.services.gateway.connections.resets import (
    PROBATION_BURST,
    PROBATION_S,
    ConnectionCalls,
    Counts,
    ResetLimiter,
)

BURST, PER_S = 1000, 100.0


def one(number: int, num_failed: int, host: str = "10.0.0.1") -> ConnectionCalls:
    return ConnectionCalls(number, host, 1000 + number, num_failed)


def seen(*busy: ConnectionCalls, others: frozenset[int] = frozenset()) -> Counts:
    return Counts(busy, others | {count.number for count in busy})


def test_as_many_as_may_be_open_may_be_given_up_at_once() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, BURST), one(2, 0)), 0.0) == []
    assert resets.judge(seen(one(1, BURST + 1), one(2, PROBATION_BURST)), 0.0) == [one(1, BURST + 1)]


def test_a_flood_on_many_connections_is_found_by_its_sum_and_those_that_reset_few_stay() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    num, few = BURST // 4, one(5, PROBATION_BURST)
    flood = [one(number, num) for number in range(1, 5)]
    other = one(9, BURST, "10.0.0.2")
    assert resets.judge(seen(*flood, other), 0.0) == []
    more = [one(number, num + PROBATION_BURST + 1) for number in range(1, 5)]
    assert resets.judge(seen(*more, few, other), 0.0) == more


def test_the_bucket_of_an_address_fills_again_as_that_of_a_connection() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, BURST // 2), one(2, BURST // 2)), 0.0) == []
    full_s = BURST / PER_S
    assert resets.judge(seen(one(1, BURST), one(2, BURST)), full_s) == []  # as fast as each may for ever
    at_once = [one(1, BURST + 2 * PROBATION_BURST), one(2, BURST + BURST - PROBATION_BURST)]
    assert resets.judge(seen(*at_once), full_s) == at_once


def test_an_address_whose_connections_reset_much_is_no_longer_in_debt_when_its_bucket_is_full_again() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, 100 * BURST), one(2, 0)), 0.0) == [one(1, 100 * BURST)]
    assert resets.judge(seen(one(2, 0)), 2 * BURST / PER_S) == []
    assert resets.judge(seen(one(2, BURST)), 2 * BURST / PER_S) == []


def test_some_a_second_may_be_given_up_for_ever() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    for second in range(1, 1000):
        assert resets.judge(seen(one(1, int(PER_S) * second)), float(second)) == []
    assert resets.judge(seen(one(1, 99_900 + BURST + 1)), 999.0) != []


def test_a_connection_is_not_judged_by_what_it_did_in_quiet_hours_when_nothing_was_counted() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, 300_000)), 3600.0) == []
    assert resets.judge(seen(one(1, 301_000)), 3600.0) == []  # its burst is still whole


def test_an_address_that_was_cut_gets_less_for_a_while_and_others_of_it_that_reset_nothing_stay() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, BURST + 1), one(2, 5), one(3, 0, "10.0.0.2")), 0.0) == [one(1, BURST + 1)]
    again = one(4, PROBATION_BURST + 1)
    others = [one(2, 5 + PROBATION_BURST), one(3, BURST, "10.0.0.2")]
    assert resets.judge(seen(again, *others), 0.0) == [again]
    later_s = PROBATION_S + 1.0
    assert resets.judge(seen(*others), later_s) == []
    assert resets.judge(seen(*others, one(5, BURST)), later_s) == []


def test_a_connection_that_was_idle_meanwhile_is_judged_by_what_it_did_since_it_was_counted() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    assert resets.judge(seen(one(1, 900)), 0.0) == []
    assert resets.judge(seen(others=frozenset({1})), 0.5) == []
    assert resets.judge(seen(one(1, 900 + 200)), 1.0) == []  # 100 were left, and 100 came in a second
    assert resets.judge(seen(one(1, 900 + 201)), 1.0) != []


def test_an_address_is_suspect_for_a_while_after_a_cut() -> None:
    resets = ResetLimiter(BURST, PER_S, 0.0)
    resets.suspect("10.0.0.1", 0.0)
    assert resets.is_suspect("10.0.0.1") and not resets.is_suspect("10.0.0.2")
    resets.judge(seen(), PROBATION_S + 1.0)
    assert not resets.is_suspect("10.0.0.1")
