"""Durations of the contract: their bounds, and what a refusal says."""

import pytest
from google.protobuf.duration_pb2 import Duration

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract.durations import to_duration, to_seconds


def test_a_duration_within_its_bounds_becomes_seconds() -> None:
    assert to_seconds("deadline", Duration(seconds=1, nanos=500_000_000), 2.0) == 1.5
    assert to_seconds("grace", Duration(), 2.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("asked", "low_s", "bounds"),
    [(Duration(), None, "(0, 2]"), (Duration(seconds=3), None, "(0, 2]"), (Duration(nanos=1), 0.5, "[0.5, 2]")],
)
def test_one_outside_its_bounds_is_refused_and_named(asked: Duration, low_s: float | None, bounds: str) -> None:
    with pytest.raises(ServiceError) as refused:
        to_seconds("deadline", asked, 2.0, low_s)
    assert "deadline" in refused.value.message and bounds in refused.value.message


def test_seconds_become_a_duration() -> None:
    assert to_duration(1.25) == Duration(seconds=1, nanos=250_000_000)
    assert to_duration(-1.0) == Duration()
