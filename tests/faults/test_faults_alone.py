"""Processes without a supervisor, as in containers: streams go on after a process was replaced from outside."""

import signal
from collections.abc import Iterator

import pytest

from benchmarks.streams import Received, at_phase, stream_all, varied
from tests.system.roles import Roles, four_roles
from tests.system.service import wait_until

SPECS = varied(6, 32)


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with four_roles(tmp_path_factory.mktemp("ring") / "keys") as running:
        wait_until(running.is_serving, 60, "the ring did not close")
        yield running


@pytest.fixture(scope="module")
def undisturbed(roles: Roles) -> list[Received]:
    answers = stream_all(roles.service.address, SPECS)
    assert [answer.error for answer in answers] == [""] * len(SPECS)
    return answers


@pytest.mark.parametrize("role", ["tokenizer", "engine", "detokenizer"])
def test_streams_survive_a_process_that_is_replaced(roles: Roles, undisturbed: list[Received], role: str) -> None:
    answers = stream_all(roles.service.address, SPECS, at_phase("decode", 1, lambda: roles.replace(role)))
    assert [one.answer for one in answers] == [one.answer for one in undisturbed]
    wait_until(roles.is_serving, 60, "the service did not recover")


@pytest.mark.long
def test_an_engine_that_was_asleep_goes_on_and_repeats_nothing(roles: Roles, undisturbed: list[Received]) -> None:
    """F2: the process is not restarted; it is found silent, and found again."""
    engine = roles.processes["engine"]
    seen: list[bool] = []

    def sleep_until_found_silent() -> None:
        engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: not roles.is_serving(), 7, "a silent engine was not found")
        seen.append(roles.is_serving())
        engine.send_signal(signal.SIGCONT)

    answers = stream_all(roles.service.address, SPECS, at_phase("decode", 2, sleep_until_found_silent))
    assert seen == [False]
    assert [one.answer for one in answers] == [one.answer for one in undisturbed]
    wait_until(roles.is_serving, 60, "the service did not recover")
