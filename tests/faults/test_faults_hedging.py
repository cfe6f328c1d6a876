"""Engines that stop for a while, and second engines that go on with their streams before any probe finds out.

Long: `pytest -m long`. The simulated ring does the same in the quick tests (`pipeline`).
"""

import contextlib
from collections.abc import Iterator

import psutil
import pytest
from sluice.v1 import control_pb2

from benchmarks.streams import Received, at_phase, stream_all, varied
from tests.faults.test_faults_engines import callers, is_whole
from tests.faults.test_faults_kill import BACK_WITHIN_S, NUM_STREAMS, OPTIONS, check_undisturbed
from tests.system.service import Service, serve, wait_until

SPECS = varied(NUM_STREAMS, 400)  # so long that no engine has computed all of it when its first text comes


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    ways = ("--engines", "3", "--routing", "kv-cost", "--shared-cache-bytes", str(1 << 26))
    slow = ("--hedging-delay-ms", "200", "--probe-timeout-s", "60")
    with serve(*OPTIONS, *ways, *slow) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[Received]:
    answers = stream_all(service.address, SPECS)
    assert not any(answer.error for answer in answers)
    return answers


def num_won(service: Service) -> int:
    """The streams that went on at a second engine."""
    with service.control() as control:
        load = control.GetLoad(control_pb2.GetLoadRequest()).load
    return sum(one.routed["hedge"] for one in load.engines)


@pytest.mark.long
@pytest.mark.parametrize("point", range(5))
def test_streams_of_an_engine_that_stops_go_on_at_another(
    service: Service, undisturbed: list[Received], point: int
) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    stopped, before = service.children()[f"engine-{point % 3}"], num_won(service)
    with callers(service) as errors:
        answers = stream_all(service.address, SPECS, at_phase("decode", point, stopped.suspend))
        with contextlib.suppress(psutil.NoSuchProcess):  # a supervisor has started it again
            stopped.resume()
    check_undisturbed(answers, undisturbed)
    assert not errors and num_won(service) > before
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")
