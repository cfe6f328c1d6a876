"""Which of several addresses gets a call: by load, and by what failed there."""

import random

import grpc
import pytest
from sluice import SluiceError
from sluice.balance import FRESH_S, MAX_REST_S, Balance, spread
from sluice.v1 import control_pb2

LOST = SluiceError("x", code=grpc.StatusCode.UNAVAILABLE)


def refused(code: grpc.StatusCode, reason: str, retry_after_s: float) -> SluiceError:
    made = SluiceError("x", code=code, reason=reason)
    made.retry_after_s = retry_after_s
    return made


def load(*running: int, waiting: int = 0) -> control_pb2.Load:
    engines = [control_pb2.EngineLoad(running_requests=num, waiting_requests=waiting) for num in running]
    return control_pb2.Load(engines=engines)


def counts(balance: Balance, num: int, now: float, addresses: int) -> list[int]:
    """How many of `num` calls each address gets, which end at once."""
    rng, found = random.Random(1), [0] * addresses
    for _ in range(num):
        index = balance.choose(now, (rng.random(), rng.random()))
        found[index] += 1
    return found


def test_the_one_with_fewer_requests_for_each_engine_gets_the_call() -> None:
    balance = Balance(2)
    balance.reported(0, load(6, 6, 6), 0.0)
    balance.reported(1, load(5, waiting=2), 0.0)
    assert counts(balance, 20, 0.5, 2) == [20, 0]
    balance.reported(0, load(6, 6, 12), 1.0)
    assert counts(balance, 20, 1.5, 2) == [0, 20]


def test_calls_since_the_report_count_with_it() -> None:
    balance = Balance(2)
    balance.reported(0, load(4), 0.0)
    balance.reported(1, load(0), 0.0)
    taken = []
    for _ in range(6):
        taken.append(balance.choose(0.1, (0.9, 0.0)))
        balance.begun(taken[-1])
    assert taken == [1, 1, 1, 1, 1, 0]
    balance.reported(1, load(3), 1.0)
    assert balance.choose(1.1, (0.0, 0.0)) == 1


def test_without_fresh_reports_the_calls_of_this_client_count() -> None:
    balance = Balance(2)
    balance.reported(0, load(0), 0.0)
    balance.reported(1, load(50), 0.0)
    balance.begun(0)
    assert balance.choose(1.0, (0.9, 0.9)) == 0
    assert balance.choose(FRESH_S + 0.1, (0.0, 0.0)) == 1
    balance.ended(0)
    balance.begun(1)
    assert balance.choose(FRESH_S + 0.1, (0.9, 0.9)) == 0


def test_of_many_two_are_drawn_so_that_clients_that_know_the_same_choose_apart() -> None:
    balance = Balance(8)
    for index in range(8):
        balance.reported(index, load(index), 0.0)
    found = counts(balance, 4000, 0.1, 8)
    assert found == sorted(found, reverse=True) and 900 < found[0] < 1100 and found[7] == 0


def test_a_lost_address_rests_longer_with_every_failure_and_comes_back() -> None:
    balance = Balance(2)
    balance.failed(0, LOST, 10.0)
    assert counts(balance, 10, 10.4, 2) == [0, 10]
    balance.failed(0, LOST, 10.4)  # another call that was lost with it
    assert sum(counts(balance, 10, 10.51, 2)[:1]) > 0
    balance.failed(0, LOST, 11.0)
    assert counts(balance, 10, 11.9, 2) == [0, 10]
    balance.reported(0, load(0), 11.95)
    balance.reported(1, load(9), 11.95)
    assert counts(balance, 10, 11.99, 2) == [0, 10]  # a report does not wake it: it may be stopping
    assert counts(balance, 10, 12.1, 2) == [10, 0]
    balance.reported(0, load(0), 12.2)
    balance.failed(0, LOST, 12.2)
    assert counts(balance, 10, 12.6, 2) == [0, 10] and balance.choose(12.75, (0.0, 0.0)) in (0, 1)


@pytest.mark.parametrize(
    ("error", "rest_s"),
    [
        (refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 2.0), 2.0),
        (refused(grpc.StatusCode.UNAVAILABLE, "DRAINING", 5.0), 5.0),
        (refused(grpc.StatusCode.UNAVAILABLE, "DRAINING", 500.0), MAX_REST_S),
        (refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 2.0), 0.0),
        (refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER", 2.0), 0.0),
    ],
)
def test_how_long_an_address_rests(error: SluiceError, rest_s: float) -> None:
    balance = Balance(2)
    balance.failed(1, error, 100.0)
    assert balance.has_another(0, 100.0 + rest_s) and (not rest_s or not balance.has_another(0, 99.99 + rest_s))


def test_where_all_rest_the_next_to_wake_is_asked_and_not_the_one_that_just_failed() -> None:
    balance = Balance(3)
    for index in (2, 0, 1):
        balance.failed(index, LOST, float(index))
    assert balance.choose(2.1, (0.0, 0.0)) in (0, 1)
    for index in range(3):
        balance.failed(index, LOST, 3.0 + index / 10)
    assert balance.choose(3.25, (0.0, 0.0)) == 0 and balance.choose(3.25, (0.0, 0.0), avoid=0) == 1
    assert Balance(1).choose(0.0, (0.5, 0.5), avoid=0) == 0


def test_every_address_has_a_connection_and_all_have_as_many_as_are_allowed() -> None:
    assert spread(["a", "b"], 5) == [3, 2] and spread(["a", "b", "c"], 1) == [1, 1, 1] and spread(["a"], 4) == [4]
