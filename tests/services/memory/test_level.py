"""The level of memory pressure: bounds, forecast, hysteresis."""

import pytest

from sluice_server.services.memory.level import NEVER_S, Bounds, Forecast, Level, PressureLevel

MIB = 1 << 20
LIMIT = 1000 * MIB
BOUNDS = Bounds(100 * MIB, 50 * MIB, 5.0)


def levels(used: list[int], step_s: float = 0.5, bounds: Bounds = BOUNDS) -> list[Level]:
    """The level after each of these samples, in MiB."""
    pressure = PressureLevel()
    return [pressure.sample(at * step_s, num * MIB, LIMIT, bounds) for at, num in enumerate(used)]


def test_bounds_are_a_share_of_the_limit_up_to_four_gib() -> None:
    assert Bounds.of(1000, 0.1) == Bounds(100, 50)
    assert Bounds.of(1 << 40, 0.1).warn == int((4 << 30) * 0.1)


@pytest.mark.parametrize(
    ("used", "level"),
    [(0, Level.OK), (899, Level.OK), (901, Level.WARN), (951, Level.CRITICAL), (2000, Level.CRITICAL)],
)
def test_the_room_decides_at_once(used: int, level: Level) -> None:
    assert levels([used])[-1] is level


def test_growth_is_seen_before_the_room_is_short() -> None:
    used = [500 + 10 * at for at in range(40)]  # 20 MiB a second
    found = levels(used)
    first = found.index(Level.WARN)
    assert (1000 - used[first]) / 20 > 5 and used[first] < 900
    assert found[:3] == [Level.OK] * 3  # a slope needs samples


def test_growth_far_from_the_limit_is_none_of_its_business() -> None:
    assert set(levels([0, 100, 200, 300, 400, 500])) == {Level.OK}  # a model that is loaded


def test_levels_fall_one_at_a_time_and_only_after_a_while() -> None:
    used = [960, *[700] * 40]
    found = levels(used)
    assert found[0] is Level.CRITICAL
    assert found[:10] == [Level.CRITICAL] * 10  # five seconds
    falls = [at for at in range(1, len(found)) if found[at] != found[at - 1]]
    assert [found[at] for at in falls] == [Level.WARN, Level.OK] and falls[1] - falls[0] >= 10


def test_a_level_does_not_flap_at_its_bound() -> None:
    found = levels([905, 895, 905, 890] * 20)
    assert set(found) == {Level.WARN}


def test_an_eased_level_that_is_short_again_waits_anew() -> None:
    found = levels([905, *[700] * 8, 905, *[700] * 9])
    assert set(found) == {Level.WARN}


def test_the_forecast_is_by_the_slope_of_the_last_seconds() -> None:
    forecast = Forecast(window_s=5.0)
    for at in range(4):
        assert forecast.seconds(100.0) == NEVER_S
        forecast.add(float(at), 10.0 * at)
    assert forecast.seconds(100.0) == pytest.approx(10.0)
    for at in range(4, 12):
        forecast.add(float(at), 30.0)
    assert forecast.seconds(100.0) == NEVER_S and forecast.seconds(-5.0) == NEVER_S


def test_samples_of_one_moment_have_no_slope() -> None:
    forecast = Forecast()
    for used in (1.0, 2.0, 3.0, 4.0):
        forecast.add(1.0, used)
    assert forecast.seconds(10.0) == NEVER_S
