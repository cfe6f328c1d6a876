"""Draws what the CPU benchmarks have written: cpu_*.json in benchmarks/results and its folders in, one SVG beside each.

    python -m benchmarks.cpu.plots

Steps by batch, throughput and time to the first token by streams, resident memory by number format, steps by context,
requests a second that keep their goals by round.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.cpu.long_context import PEERS_OF
from benchmarks.machine import RESULTS
from sluice_server.services.cli.plot import Panel, svg

Found = Mapping[str, Any]  # a file of results


def draw_decode(found: Found) -> str:
    """Milliseconds of a step."""
    contestants = {name: one["step_ms"] for name, one in found["contestants"].items()}
    batches = shared(list(contestants.values()))
    own = {name: line for name, line in contestants.items() if "." not in name and "vLLM" not in name}
    peers = {name: line for name, line in contestants.items() if name not in own}
    panels = [
        Panel(f"{whose}: step, ms", lines_of(lines, batches)) for whose, lines in (("own", own), ("peers", peers))
    ]
    return svg([float(batch) for batch in batches], "sequences", panels)


def draw_service(found: Found) -> str:
    """Output tokens a second, and the median time to the first."""
    levels = shared(list(found["servers"].values()))
    panels = []
    for title, key in (("tokens a second", "tokens_per_s"), ("TTFT p50, ms", "ttft_ms")):
        lines = {name: {level: row[level][key] for level in levels} for name, row in found["servers"].items()}
        panels.append(Panel(title, lines_of(lines, levels)))
    return svg([float(level) for level in levels], "streams", panels)


def draw_memory(found: Found) -> str:
    """MiB of weights and of all that the process has for its own, by number format: numbered as in the file."""
    rows = list(found["by_format"].values())
    names = ", ".join(f"{at} {name}" for at, name in enumerate(found["by_format"], 1))
    lines = {
        "weights and cache in use": [row["weights_and_cache_mib"] for row in rows],
        "resident": [row["own_mib"] for row in rows],
    }
    return svg([float(at) for at in range(1, len(rows) + 1)], names, [Panel("MiB", lines)])


def draw_long_context(found: Found) -> str:
    """Milliseconds of a step of the most rows by tokens of context, each cache beside peers' of its size."""
    steps = {
        tuple(int(word) for word in case.split() if word.isdigit()): row
        for case, row in found["ms"].items()
        if case.startswith("decode")
    }
    most = max(rows for _, rows in steps)
    contexts = sorted(context for context, rows in steps if rows == most)
    panels = []
    for own, peers in PEERS_OF.items():
        names = [name for name in (own, *peers) if all(name in steps[context, most] for context in contexts)]
        lines = {name: [steps[context, most][name]["ms"] for context in contexts] for name in names}
        panels.append(Panel(f"{most} rows, cache in {own}: step, ms", lines))
    return svg([float(context) for context in contexts], "tokens of context", panels)


def draw_open_load(found: Found) -> str:
    """Requests a second that keep both goals, by round."""
    lines = {name: row["rounds"]["goodput"] for name, row in found["goodput"].items()}
    num = min(map(len, lines.values()))
    shown = {name: line[:num] for name, line in lines.items()}
    return svg([float(at) for at in range(1, num + 1)], "round", [Panel("requests a second within goals", shown)])


def shared(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The places that every row has, rising: a line has no gaps."""
    places = set.intersection(*(set(row) for row in rows)) if rows else set()
    return sorted(places, key=float)


def lines_of(rows: Mapping[str, Mapping[str, float]], places: Sequence[str]) -> dict[str, list[float]]:
    """Each row at these places."""
    return {name: [row[place] for place in places] for name, row in rows.items()}


KINDS: Mapping[str, Callable[[Found], str]] = {
    "cpu_decode_": draw_decode,
    "cpu_service_": draw_service,
    "cpu_memory_": draw_memory,
    "cpu_long_context_": draw_long_context,
    "cpu_open_load_": draw_open_load,
}


def main() -> None:
    """Draw all that there is."""
    for path in sorted(RESULTS.rglob("cpu_*.json")):
        draw = next((draw for prefix, draw in KINDS.items() if path.name.startswith(prefix)), None)
        if draw is not None:
            path.with_suffix(".svg").write_text(draw(json.loads(path.read_text())))
            print(path.with_suffix(".svg"), flush=True)


if __name__ == "__main__":
    main()
