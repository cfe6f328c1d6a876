"""Time slices of threads: set, inherited, and left alone where the system does not support them."""

import ctypes
import os
import platform
import threading
from collections.abc import Callable

import pytest

from sluice_server.engine.worker.host import slices
from sluice_server.engine.worker.host.slices import LONG_S, SHORT_S, take_turns_of, turns_s


def elsewhere(call: Callable[[], None]) -> None:
    """Calls in a new thread, so that this one keeps its time slice. Raises what the call raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_turns_are_taken_and_inherited_and_niceness_stays() -> None:
    found: list[float] = []

    def take() -> None:
        if not take_turns_of(LONG_S):
            pytest.skip("this system knows no turns")
        assert turns_s() == LONG_S and os.getpriority(os.PRIO_PROCESS, 0) == before
        elsewhere(lambda: found.append(turns_s()))
        assert take_turns_of(SHORT_S) and turns_s() == SHORT_S

    before, mine = os.getpriority(os.PRIO_PROCESS, 0), turns_s()
    elsewhere(take)
    assert found == [LONG_S] and turns_s() == mine


def test_a_system_that_knows_none_or_forbids_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = turns_s()
    with monkeypatch.context() as patched:
        patched.setattr(platform, "machine", lambda: "riscv64")
        assert not take_turns_of(SHORT_S) and turns_s() == 0.0
    monkeypatch.setattr(slices, "CALLS", {platform.machine(): (-1, -1)})  # calls that there are none of: ENOSYS
    assert not take_turns_of(SHORT_S)
    monkeypatch.undo()
    assert turns_s() == mine and ctypes.sizeof(slices.Attributes) == 48
