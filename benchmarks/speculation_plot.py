"""Draws speed-up and chosen length against concurrency as one SVG. Numbers in, text out: no library, no file."""

from collections.abc import Mapping, Sequence

COLOURS = ("#1f6fb4", "#c8511b", "#2c8a4b", "#7d4fa8")
WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 240, 56, 34, 70  # of a panel, and around it

Lines = Mapping[str, Sequence[float]]  # by name: a value for each concurrency


def plot(concurrencies: Sequence[int], speed_ups: Lines, lengths: Lines) -> str:
    """Two panels side by side over the same concurrencies, which lie at equal distances."""
    left = _panel(concurrencies, speed_ups, "tokens/s of plain decoding", LEFT, level=1.0)
    right = _panel(concurrencies, lengths, "tokens drafted per row and step", LEFT + WIDTH + GAP, level=None)
    names = "".join(
        f'<text x="{LEFT + 90 * i}" y="16" fill="{COLOURS[i % len(COLOURS)]}" font-weight="bold">{name}</text>'
        for i, name in enumerate(speed_ups)
    )
    width, height = 2 * WIDTH + GAP + LEFT + 20, HEIGHT + TOP + 46
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{names}{left}{right}</svg>\n'
    )


def _panel(concurrencies: Sequence[int], lines: Lines, title: str, x: float, *, level: float | None) -> str:
    most = max([0.1, *(value for values in lines.values() for value in values)]) * 1.08
    across = [x + WIDTH * (i + 0.5) / len(concurrencies) for i in range(len(concurrencies))]
    bottom = TOP + HEIGHT

    def up(value: float) -> float:
        return bottom - HEIGHT * value / most

    parts = [
        f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x + WIDTH / 2}" y="{bottom + 36}" text-anchor="middle">{title}, by concurrency</text>',
        *(
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{num}</text>'
            for at, num in zip(across, concurrencies, strict=True)
        ),
        *(
            f'<text x="{x - 6}" y="{up(most * i / 4) + 4:.1f}" text-anchor="end">{most * i / 4:.2f}</text>'
            for i in range(5)
        ),
    ]
    if level is not None and level < most:
        parts.append(
            f'<line x1="{x}" x2="{x + WIDTH}" y1="{up(level):.1f}" y2="{up(level):.1f}" stroke="#999" '
            'stroke-dasharray="4 3"/>'
        )
    for i, values in enumerate(lines.values()):
        points = " ".join(f"{at:.1f},{up(value):.1f}" for at, value in zip(across, values, strict=True))
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(parts)
