"""The turns of threads that start in the block, or their policy where the system knows no turns; and of those that are
there already."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway import threads
from services.gateway.threads import MIDDLE_S, yielding_threads
from services.slices import take_turns_of, turns_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def in_new_thread(ask: Callable[[], Any]) -> Any:  # noqa: ANN401 # whatever it says
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def policy_of_new_thread() -> int:
    return int(in_new_thread(lambda: os.sched_getscheduler(0)))


@pytest.fixture
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that knows none."""
    monkeypatch.setattr(threads, "take_turns_of", lambda seconds: False)


def test_threads_of_the_block_take_longer_turns_and_no_others() -> None:
    def start() -> tuple[bool, float, float, float]:
        mine = turns_s()
        with yielding_threads():
            inside = in_new_thread(turns_s)
        return take_turns_of(mine), mine, inside, turns_s()

    knows, mine, inside, after = in_new_thread(start)
    if not knows:
        pytest.skip("this system knows no turns")
    assert inside == MIDDLE_S != mine == after


def test_threads_of_the_block_yield_and_no_others(no_turns: None) -> None:
    before = os.sched_getscheduler(0)
    with yielding_threads():
        assert policy_of_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_new_thread() == before


def test_what_was_set_is_set_again_when_the_block_fails(no_turns: None) -> None:
    before = os.sched_getscheduler(0)
    with pytest.raises(ValueError, match="the server"), yielding_threads():
        raise ValueError("the server")
    assert os.sched_getscheduler(0) == before


def test_nothing_changes_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch, no_turns: None) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    before = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    with yielding_threads():
        assert policy_of_new_thread() == before
