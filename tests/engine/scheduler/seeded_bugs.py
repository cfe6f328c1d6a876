"""The check that the simulator notices a bug planted in the engine's classes."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice_server.engine.errors import ServiceError
from tests.engine.scheduler.simulate import Simulation

EVENTS = 3000  # of each seed, within which a bug must show
SEEDS = range(24)

Bug = tuple[object, str, Callable[..., Any]]


def assert_noticed() -> None:
    """Simulates seed after seed until one fails."""
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, ServiceError)):
        for seed in SEEDS:
            Simulation(seed).run(EVENTS)
