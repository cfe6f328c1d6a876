"""Fixtures of the tests of whole engines."""

import pytest

from sluice_server.engine.scheduler import shortage


@pytest.fixture
def preempts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines preempt where a block is missing, also where outputs that end soon would leave one."""
    monkeypatch.setattr(shortage, "STEPS_PER_TOKEN", 0.0)
