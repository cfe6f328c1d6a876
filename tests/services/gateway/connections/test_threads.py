"""The scheduling policy of threads that start within a block, and of existing ones; turns at the interpreter."""

import os
import sys
import threading

import pytest

from sluice_server.services.gateway.connections.threads import TURN_S, USUAL_S, short_turns, yielding_threads

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def policy_of_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@linux
def test_threads_of_the_block_yield_and_no_others() -> None:
    before = os.sched_getscheduler(0)
    with yielding_threads():
        assert policy_of_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_new_thread() == before


@linux
def test_what_was_set_is_set_again_when_the_block_fails() -> None:
    before = os.sched_getscheduler(0)
    with pytest.raises(ValueError, match="the server"), yielding_threads():
        raise ValueError("the server")
    assert os.sched_getscheduler(0) == before


@linux
def test_nothing_changes_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    before = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    with yielding_threads():
        assert policy_of_new_thread() == before


def test_turns_at_the_interpreter_are_short_in_the_block_only() -> None:
    assert sys.getswitchinterval() == pytest.approx(USUAL_S)
    with pytest.raises(ValueError, match="a count"), short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
        raise ValueError("a count")
    assert sys.getswitchinterval() == pytest.approx(USUAL_S)
