"""Draws lines over load as one SVG: panels side by side, each with its own scale from zero. Pure: returns text."""

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 300, 220, 48
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Attributes:
        title: the quantity, with its unit.
        lines: by name, one value per load.
    """

    title: str
    lines: Mapping[str, Sequence[float]]


def svg(loads: Sequence[float], axis: str, panels: Sequence[Panel]) -> str:
    """Returns the SVG. `loads` are ascending, at least one."""
    drawn = "".join(_panel(at, loads, axis, panel) for at, panel in enumerate(panels))
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT + MARGIN}"'
    style = 'font-family="sans-serif" font-size="11" style="background:white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{drawn}</svg>\n'


def ticks(highest: float) -> list[float]:
    """Returns round numbers from zero to the first one that is at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    steps = (digit * 10.0**power for power in range(-6, 15) for digit in (1, 2, 5))
    step = next(one for one in steps if one * 5 >= highest)
    return [step * at for at in range(int(-(-highest // step)) + 1)]


def _panel(at: int, loads: Sequence[float], axis: str, panel: Panel) -> str:
    left, right, top, bottom = at * WIDTH + MARGIN, (at + 1) * WIDTH - 12, 34, HEIGHT
    marks = ticks(max((value for line in panel.lines.values() for value in line), default=0.0))

    def x(number: int) -> float:  # loads are spaced evenly, as they mostly double
        return left + (right - left) * number / max(len(loads) - 1, 1)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / marks[-1]

    parts = [
        _text((left + right) / 2, 16, panel.title, "middle"),
        _text((left + right) / 2, HEIGHT + 34, axis, "middle"),
    ]
    for mark in marks:
        parts.append(f'<path d="M{left} {y(mark):.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(left - 5, y(mark) + 4, f"{mark:g}", "end"))
    parts += [_text(x(number), HEIGHT + 16, f"{load:g}", "middle") for number, load in enumerate(loads)]
    for number, (name, line) in enumerate(panel.lines.items()):
        points = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in enumerate(line))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(left + 6, top + 10 + 13 * number, name, "start", colour))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
