from xml.etree import ElementTree

import pytest

from sluice_server.services.cli.plot import HEIGHT, Panel, svg, ticks

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("highest", "found"),
    [(0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6, 8]), (90.0, [0, 20, 40, 60, 80, 100])],
)
def test_scales_have_few_round_marks_and_reach_the_highest(highest: float, found: list[float]) -> None:
    assert ticks(highest) == pytest.approx(found)


def test_each_line_has_a_point_a_load_and_the_highest_is_at_the_top() -> None:
    panel = Panel("latency <ms>", {"p50": [1.0, 2.0, 4.0], "p99": [2.0, 5.0, 10.0]})
    root = ElementTree.fromstring(svg([1, 2, 4], "streams", [panel, panel]))
    lines = root.findall(f"{NAMESPACE}polyline")
    assert len(lines) == 4
    points = [tuple(map(float, point.split(","))) for point in lines[1].get("points", "").split()]
    assert len(points) == 3 and points[0][0] < points[1][0] < points[2][0]
    assert points[2][1] == 34 and HEIGHT > points[0][1] > points[1][1]
    assert "latency <ms>" in [one.text for one in root.findall(f"{NAMESPACE}text")]


def test_nothing_received_is_drawn_as_nothing() -> None:
    assert ElementTree.fromstring(svg([1], "streams", [Panel("t", {"p50": [0.0]})])) is not None
