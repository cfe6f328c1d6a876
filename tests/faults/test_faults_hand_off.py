"""Engines for prompts and those that go on, each lost at many points of hand-offs: no stream notices.

Long: `pytest -m long`. The simulated ring hands off in the quick tests (`pipeline`).
"""

from collections.abc import Iterator

import pytest

from benchmarks.streams import Received, at_phase, stream_all, varied
from tests.faults.test_faults_engines import callers, is_whole, killing
from tests.faults.test_faults_kill import BACK_WITHIN_S, OPTIONS, check_undisturbed
from tests.system.service import Service, serve, spec, wait_until

SPECS = [*varied(8, 200), *(spec([at, *range(100, 900)], 60, seed=at, temperature=0.9) for at in range(8))]
POINTS = 20


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    ways = ("--engines", "3", "--prefill-engines", "1", "--routing", "kv-cost", "--shared-cache-bytes", str(1 << 26))
    with serve(*OPTIONS, *ways, "--kv-cache-tokens", "16384", "--probe-timeout-s", "1") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[Received]:
    answers = stream_all(service.address, SPECS)
    assert not any(answer.error for answer in answers)
    return answers


@pytest.mark.long
@pytest.mark.parametrize("point", range(POINTS))
@pytest.mark.parametrize("lost", [("engine-0",), ("engine-1",), ("engine-0", "engine-2")], ids="+".join)
def test_the_loss_of_engines_during_hand_offs_costs_no_token(
    service: Service, undisturbed: list[Received], lost: tuple[str, ...], point: int
) -> None:
    names = {"engine-0", "engine-1", "engine-2"}
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    with callers(service) as errors:
        answers = stream_all(service.address, SPECS, at_phase("decode", point, killing(service, *lost)))
        wait_until(lambda: service.children().keys() >= names, BACK_WITHIN_S, "an engine is not back")
    check_undisturbed(answers, undisturbed)
    assert not errors
