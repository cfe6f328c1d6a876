"""The scheduling policy of threads that start within the block, and of existing threads."""

import os
import sys
import threading

import pytest

from sluice_server.services.gateway.connections.threads import yielding_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def policy_of_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_of_the_block_yield_and_no_others() -> None:
    before = os.sched_getscheduler(0)
    with yielding_threads():
        assert policy_of_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_new_thread() == before


def test_what_was_set_is_set_again_when_the_block_fails() -> None:
    before = os.sched_getscheduler(0)
    with pytest.raises(ValueError, match="the server"), yielding_threads():
        raise ValueError("the server")
    assert os.sched_getscheduler(0) == before


def test_nothing_changes_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    before = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    with yielding_threads():
        assert policy_of_new_thread() == before
