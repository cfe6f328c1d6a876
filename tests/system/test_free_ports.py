"""Ports for services under test: given once, also to test processes that run at the same time."""

import random
import subprocess
import sys

import pytest

from tests.system.roles import free_ports


def test_no_ports_are_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(2)
    firsts, randrange = iter([first[0], first[1], first[0] - 1]), random.randrange
    monkeypatch.setattr(random, "randrange", lambda *bounds: next(firsts, None) or randrange(*bounds))
    assert not {*first} & {*free_ports(2)}
    assert next(firsts, None) is None, "all three are refused"


def test_no_ports_are_given_to_two_processes() -> None:
    first = free_ports(1)[0]
    code = (
        "import random; from tests.system import roles\n"
        f"firsts, randrange = iter([{first}]), random.randrange\n"
        "random.randrange = lambda *bounds: next(firsts, None) or randrange(*bounds)\n"
        "print(roles.free_ports(1)[0])"
    )
    given = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(given.stdout) != first
