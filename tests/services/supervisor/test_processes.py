"""The processes of a service: which of them start again beside others that serve for them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.services.messages.processes import Role
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.processes import KIND, TAKE_OVER_S, Processes

ENDED_S, WHOLE_UNTIL_S = 50.0, 20.0
CHILDREN = (
    Child("tokenizer-0", Role.TOKENIZER, {}),
    Child("tokenizer-1", Role.TOKENIZER, {}),
    Child("engine-0", Role.ENGINE, {}, group="engine-0"),
    Child("worker-0-1", None, {}, group="engine-0"),
    Child("engine-1", Role.ENGINE, {}),
    Child("engine-2", Role.ENGINE, {}),
    Child("engine-3", Role.ENGINE, {KIND: "prefill"}),
    Child("m1-engine-0", Role.ENGINE, {}, lane="m1"),
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(CHILDREN, (sys.executable, "-c", "import signal; signal.pause()"), tmp_path, 2, 1.0)
    for child in made.all:
        child.start()
        child.started_s = WHOLE_UNTIL_S - 1.0
    yield made
    for child in made.all:
        child.kill()


def starts_beside(processes: Processes, name: str) -> list[str]:
    """Ends a process, and returns those that start beside others then."""
    child = next(one for one in processes.all if one.name == name)
    child.kill()
    child.start_at_s = ENDED_S
    processes.let_others_serve(child, WHOLE_UNTIL_S)
    processes.end_group(child, child.start_at_s)
    assert child.start_at_s == ENDED_S + (TAKE_OVER_S if child.is_beside else 0.0)
    assert all(one.start_at_s == child.start_at_s for one in processes.mates(child))
    return [one.name for one in processes.all if one.is_beside]


def test_an_engine_starts_a_moment_later_beside_its_like(processes: Processes) -> None:
    assert starts_beside(processes, "engine-1") == ["engine-1"]


@pytest.mark.parametrize("name", ["engine-0", "worker-0-1"])
def test_all_ranks_of_an_engine_start_beside_others(processes: Processes, name: str) -> None:
    assert starts_beside(processes, name) == ["engine-0", "worker-0-1"]


@pytest.mark.parametrize("name", ["tokenizer-0", "engine-3", "m1-engine-0"])
def test_what_has_no_like_that_serves_starts_at_once(processes: Processes, name: str) -> None:
    assert starts_beside(processes, name) == []


def test_an_engine_does_not_wait_for_others_that_are_gone_or_loading(processes: Processes) -> None:
    others = {one.name: one for one in processes.all}
    others["engine-1"].started_s = WHOLE_UNTIL_S + 1.0  # it was lost before
    processes.falling.add("engine-0")  # with its group
    assert starts_beside(processes, "engine-2") == []
