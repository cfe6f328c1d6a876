"""The order in which rank 0 does what it has told the other ranks."""

from collections.abc import Callable

import pytest

from sluice_server.engine.errors import DeviceLost
from sluice_server.engine.parallel.backlog import Backlog
from sluice_server.engine.plan import StepResult
from sluice_server.engine.worker.runner import CompletedStep


def noting(done: list[int], token: int, error: Exception | None = None) -> Callable[[], CompletedStep]:
    """A step that notes when it is computed."""

    def compute() -> CompletedStep:
        done.append(token)
        if error is not None:
            raise error
        return CompletedStep(StepResult([token]))

    return compute


def test_work_waits_for_the_steps_before_it() -> None:
    backlog, done = Backlog(), list[int]()
    backlog.do(lambda: done.append(0))
    assert done == [0], "nothing is before it"
    first = backlog.step(noting(done, 1))
    backlog.do(lambda: done.append(2))
    second = backlog.step(noting(done, 3))
    backlog.do(lambda: done.append(4))
    assert done == [0] and not first.is_done
    assert first.collect().token_ids == [1]
    assert done == [0, 1] and first.is_done and not second.is_done
    assert second.collect().token_ids == [3]
    assert done == [0, 1, 2, 3]
    backlog.catch_up()
    assert done == [0, 1, 2, 3, 4] and second.collect().token_ids == [3], "nothing is computed twice"


def test_a_later_step_takes_those_before_it_along() -> None:
    backlog, done = Backlog(), list[int]()
    first, second = backlog.step(noting(done, 1)), backlog.step(noting(done, 2))
    assert second.collect().token_ids == [2]
    assert first.is_done and done == [1, 2]


def test_a_step_that_fails_says_so_when_it_is_collected_and_stops_no_other() -> None:
    backlog, done = Backlog(), list[int]()
    first, second = backlog.step(noting(done, 1, RuntimeError("no"))), backlog.step(noting(done, 2))
    assert second.collect().token_ids == [2]
    assert first.is_done
    with pytest.raises(RuntimeError, match="no"):
        first.collect()


def test_nothing_is_computed_once_the_group_has_ended() -> None:
    """A step that waits for a rank that is stuck would wait again."""
    backlog, done = Backlog(), list[int]()
    first, second = backlog.step(noting(done, 1, DeviceLost("gone"))), backlog.step(noting(done, 2))
    with pytest.raises(DeviceLost):
        first.collect()
    with pytest.raises(DeviceLost):
        second.collect()
    backlog.catch_up()
    assert done == [1]
