"""The size of a cache while memory is short, and afterwards."""

import dataclasses

from sluice_server.engine.pressure import CALM_S, CRITICAL_S, WARN_S, CacheNeeds, CachePressure

NEEDS = CacheNeeds(now=800, reached=300, least=100, wanted=800, most=800)


def sizes(pressure: CachePressure, times: list[float], needs: CacheNeeds, **how: bool) -> list[int]:
    """The sizes at these times, each of which is the cache's next one."""
    found = []
    for now_s in times:
        size = pressure.size(now_s, needs, **{"is_short": True, "is_critical": False, **how})
        needs = dataclasses.replace(needs, now=size, reached=min(needs.reached, size))
        found.append(size)
    return found


def test_first_it_takes_no_more_memory() -> None:
    assert sizes(CachePressure(), [0.0, 1.0, WARN_S - 0.1], NEEDS) == [300, 300, 300]


def test_then_it_becomes_smaller_step_by_step_down_to_what_is_needed() -> None:
    found = sizes(CachePressure(), [WARN_S * at for at in range(12)], NEEDS)
    assert found[:3] == [300, 262, 229] and found[-1] == 100
    fast = sizes(CachePressure(), [CRITICAL_S * at for at in range(6)], NEEDS, is_critical=True)
    assert fast == [300, 225, 168, 126, 100, 100]


def test_a_cache_that_is_full_shrinks_at_once() -> None:
    assert sizes(CachePressure(), [0.0], dataclasses.replace(NEEDS, reached=800)) == [700]


def test_a_cache_below_what_is_needed_is_left_as_it_is() -> None:
    assert sizes(CachePressure(), [0.0, 99.0], dataclasses.replace(NEEDS, now=50, reached=50)) == [50, 50]


def test_it_grows_back_in_steps_after_a_calm() -> None:
    pressure = CachePressure()
    sizes(pressure, [0.0], NEEDS)
    needs = dataclasses.replace(NEEDS, now=300)
    found = sizes(
        pressure, [1.0, CALM_S, CALM_S + 1, 2 * CALM_S, 2 * CALM_S + 1, 3 * CALM_S + 1, 999.0], needs, is_short=False
    )
    assert found == [300, 300, 500, 500, 700, 800, 800]


def test_pressure_begins_the_calm_anew() -> None:
    pressure = CachePressure()
    needs = dataclasses.replace(NEEDS, now=300, reached=300)
    assert sizes(pressure, [0.0], needs, is_short=False) == [300]
    assert sizes(pressure, [CALM_S - 1], needs)[0] < 300
    assert sizes(pressure, [CALM_S + 1], needs, is_short=False) == [300]


def test_it_grows_beyond_what_was_asked_for_only_while_requests_wait() -> None:
    needs = dataclasses.replace(NEEDS, most=1600)
    for waits, expected in ((False, 800), (True, 1200)):
        pressure = CachePressure()
        found = sizes(pressure, [0.0, CALM_S], dataclasses.replace(needs, is_waited_for=waits), is_short=False)
        assert found == [800, expected]
