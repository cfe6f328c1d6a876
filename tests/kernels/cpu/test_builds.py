"""The compiled builds of our CPU kernels, and whether each can be used here."""

import importlib.machinery
from pathlib import Path

import pytest

import sluice_server.kernels.cpu
from sluice_server.kernels.cpu import builds

REFUSED = "the operating system does not let this process use AMX"


def built() -> list[str]:
    """The instruction sets with a built module, in the order of `builds.KNOWN`."""
    rooms = [Path(room) for room in sluice_server.kernels.cpu.__path__]
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return [name for name in builds.KNOWN if any((room / (name + end)).exists() for room in rooms for end in suffixes)]


@pytest.mark.parametrize("name", built())
def test_a_module_that_was_built_can_be_used_on_a_machine_that_has_what_it_needs(name: str) -> None:
    if name not in builds.runnable():
        pytest.skip(f"this machine lacks what {name} was built for")
    assert builds.why_not(name) in ("", REFUSED)


def test_the_best_module_of_those_that_can_be_used_is_in_use() -> None:
    usable = [name for name in builds.runnable() if builds.load(name) is not None]
    assert builds.instruction_set() == next(iter(usable), "none")


def test_a_module_that_is_not_there_says_so() -> None:
    assert builds.load("v9") is None
    assert "v9" in builds.why_not("v9")
