"""Draws how near each kernel comes to the roofline: takes results by part, writes one SVG per part. Needs no GPU.

    python -m benchmarks.gpu_plots

A panel is a kernel, or attention over one format of the cache; 100 % is what bandwidth and tensor cores allow for its
bytes and operations at that size.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from sluice_server.services.cli.plot import Panel, svg

AXES = {"decode": "keys of all rows", "sample": "rows", "linear": "rows", "experts": "tokens", "copy": "blocks"}
LINES = {"roofline": None, "ours": "of_roofline", "torch": "torch_of_roofline"}


DRAWN = ("gpu_attention", "gpu_kernels")


def main() -> None:
    """Draws the available results."""
    for name in DRAWN:
        path = RESULTS / f"{name}.json"
        if path.exists():
            for drawn in draw(name, json.loads(path.read_text())["rows"]):
                print(drawn)


def draw(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Writes benchmarks/results/NAME_PART.svg of each part with results."""
    written = []
    for part in dict.fromkeys(row["part"] for row in rows.values()):
        own = [row for row in rows.values() if row["part"] == part]
        sizes = sorted({row["size"] for row in own})
        panels = [panel for group in dict.fromkeys(row["group"] for row in own) if (panel := _panel(group, own, sizes))]
        if panels:
            RESULTS.mkdir(exist_ok=True)
            written.append(RESULTS / f"{name}_{part}.svg")
            written[-1].write_text(svg([float(size) for size in sizes], AXES.get(part, "tokens"), panels))
    return written


def _panel(group: str, rows: list[Mapping[str, Any]], sizes: list[int]) -> Panel | None:
    """A kernel that was measured at every size: a line has no gaps."""
    by_size = {row["size"]: row for row in rows if row["group"] == group}
    if set(by_size) != set(sizes):
        return None
    whole = {name: key for name, key in LINES.items() if all(key is None or key in row for row in by_size.values())}
    lines = {
        name: [100.0 * (1.0 if key is None else by_size[size][key]) for size in sizes] for name, key in whole.items()
    }
    return Panel(f"{group}: % of the roofline", lines)


if __name__ == "__main__":
    main()
