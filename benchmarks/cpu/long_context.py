"""Decode steps behind long contexts, prefill of a long prompt, and eight readers of one long prefix: ours, llama.cpp's
and vLLM's, each with caches of several number formats.

    python -m benchmarks.cpu.long_context [--shape 61M] [--contexts 32768,8192,1024] [--rows 1,8] [--runs 5] [--steps 8]
                                          [--prefix 16384] [--only NAME,…] [--parts decode,shared,prefill]
                                          [--threads 2] [--clock wall] [--fresh]

Weights are in float32, so that the steps differ by their attention. Contexts are filled, not computed (see the
workers). Every contestant is asked in turn; a figure is the median over runs of the run's median step. `attention` is a
step less the same rows' step behind 64 tokens; `memory` is the time in which torch sums as many bytes as a step has to
read, of which a kernel that fetches ahead needs 0.9. --clock cpu, with --threads 1, measures processor time instead of
wall time, for a machine with other users. What has been measured is kept beside the checkpoints: a benchmark that was
stopped goes on where it was, --fresh begins again.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.cpu.decode import PEERS, VENVS, Contestant, start
from benchmarks.cpu.shapes import CACHE, SHAPES, lengthened
from benchmarks.machine import end_as_asked, median, write

SHORT = 64  # the context behind which a step is everything but attention
LEAST_SHARE = 0.2  # of a step, that attention takes for its time to be read from a difference
MARGIN = 1024
# A cache of ours, and the peers' of the same or the next larger size.
PEERS_OF = {
    "float32": ("vLLM float32", "llama.cpp f16"),
    "bfloat16": ("llama.cpp f16",),
    "int8": ("llama.cpp q8_0",),
}
MEMORY = "memory"
CONTESTANTS = (*PEERS_OF, "llama.cpp f16", "llama.cpp q8_0", "vLLM float32", *(f"{MEMORY} {own}" for own in PEERS_OF))
PARTS = ("decode", "shared", "prefill")

Key = tuple[str, int, int, int, str]  # part, context, rows, run, contestant
Found = dict[Key, float]  # milliseconds


def command(name: str, shape: str, longest: int) -> list[str]:
    """What starts a contestant."""
    directory = str(lengthened(shape, longest + MARGIN))
    kind, _, form = name.rpartition(" ")
    if kind == "llama.cpp":
        python, script = VENVS / "llama" / "bin" / "python", PEERS / "llama_cpp_context_worker.py"
        about = [f"{directory}/config.json", form, str(longest)]
        return [str(python), str(script), *about, str(CACHE / f"{shape}-f32-{longest}.gguf")]
    if kind == "vLLM":
        script = PEERS / "vllm_context_worker.py"
        return [str(VENVS / "vllm" / "bin" / "python"), str(script), directory, form, str(longest)]
    if kind == MEMORY:
        return [sys.executable, "-m", "benchmarks.cpu.memory_worker", shape, form]
    return [sys.executable, "-m", "benchmarks.cpu.own_context_worker", directory, form, str(longest)]


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Part, context, rows: contexts become shorter, as peers cut what they have filled."""
    contexts, rows = numbers(options.contexts), numbers(options.rows)
    if "decode" in options.parts:
        yield from (("decode", context, num) for context in sorted({*contexts, SHORT}, reverse=True) for num in rows)
    if "shared" in options.parts:
        yield "shared", options.prefix, max(rows)
    if "prefill" in options.parts:
        yield "prefill", options.prefix, 1


def measure(contestants: Sequence[Contestant], options: argparse.Namespace, kept: Path, found: Found) -> None:
    """What is not found yet, in turn; each goes to the file at once."""
    for part, context, rows in cases(options):
        for run in range(options.runs):
            for one in contestants:
                key = part, context, rows, run, one.name
                if key in found or (part == "prefill" and one.name.startswith(MEMORY)):
                    continue
                found[key] = round(median(one.ask(part, context=context, rows=rows, steps=options.steps)) * 1e3, 3)
                with kept.open("a") as file:
                    file.write(json.dumps([*key, found[key]]) + "\n")
                print(f"{part}, {context} tokens × {rows}, run {run}, {one.name}: {found[key]:.1f} ms", flush=True)


def read(kept: Path) -> Found:
    """What an earlier run has measured."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(part, context, rows, run, name): ms for part, context, rows, run, name, ms in map(json.loads, lines)}


def table(found: Found) -> dict[str, object]:
    """By case and contestant: the median, least and most; and what the goals are about."""
    medians: dict[tuple[str, int, int], dict[str, float]] = {}
    figures: dict[str, dict[str, object]] = {}
    for part, context, rows in sorted({key[:3] for key in found}):
        names = sorted({key[4] for key in found if key[:3] == (part, context, rows)})
        runs = {
            name: [ms for key, ms in found.items() if (*key[:3], key[4]) == (part, context, rows, name)]
            for name in names
        }
        medians[part, context, rows] = {name: round(median(each), 2) for name, each in runs.items()}
        figures[f"{part}, {context} tokens, {rows} rows"] = {
            name: {"ms": medians[part, context, rows][name], "least": min(each), "most": max(each), "runs": len(each)}
            for name, each in runs.items()
        }
    return {
        "ms": figures,
        "over_best_peer": over_peers(medians),
        "memory_over_best_peer": over_peers(medians, f"{MEMORY} "),
        "int8_attention_over_bfloat16": attention(medians),
    }


def over_peers(
    medians: Mapping[tuple[str, int, int], Mapping[str, float]], prefix: str = ""
) -> dict[str, dict[str, float]]:
    """Ours, or what goes by its name behind a prefix, over the faster of the peers with a cache of that size."""
    ratios: dict[str, dict[str, float]] = {}
    for (part, context, rows), row in medians.items():
        for own, peers in PEERS_OF.items():
            best = min((row[peer] for peer in peers if peer in row), default=0.0)
            took = row.get(prefix + own)
            if took and best and (part, context) != ("decode", SHORT):
                ratios.setdefault(f"{part}, {context} tokens, {rows} rows", {})[own] = round(took / best, 2)
    return ratios


def attention(medians: Mapping[tuple[str, int, int], Mapping[str, float]]) -> dict[str, float]:
    """The time of attention over an int8 cache, over that of a bfloat16 cache, where it is no small difference."""
    ratios = {}
    for (part, context, rows), row in medians.items():
        short = medians.get((part, SHORT, rows))
        if part == "decode" and context > SHORT and short and {"int8", "bfloat16"} <= {*row} & {*short}:
            took = {name: row[name] - short[name] for name in ("int8", "bfloat16")}
            if took["bfloat16"] >= LEAST_SHARE * row["bfloat16"]:
                ratios[f"{context} tokens, {rows} rows"] = round(took["int8"] / took["bfloat16"], 2)
    return ratios


def numbers(text: str) -> list[int]:
    """Of a list with commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=tuple(SHAPES))
    parser.add_argument("--contexts", default="32768,8192,1024")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--prefix", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    os.environ.update(BENCH_THREADS=options.threads, BENCH_CLOCK=options.clock)
    name, longest = f"cpu_long_context_{options.shape}", max(numbers(options.contexts))
    kept = CACHE / f"{name}-{options.threads}-{options.clock}.jsonl"
    CACHE.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        kept.unlink(missing_ok=True)
    found, contestants = read(kept), []
    try:
        for contestant in options.only.split(","):
            one = start(contestant, command(contestant, options.shape, longest), CACHE / f"{name}.log")
            if one is not None:
                contestants.append(one)
                print(f"{one.name}: ready, {one.about}", flush=True)
        measure(contestants, options, kept, found)
    finally:
        for one in contestants:
            one.process.kill()
    line = f"python -m benchmarks.cpu.long_context --shape {options.shape} --contexts {options.contexts}"
    line += f" --rows {options.rows} --prefix {options.prefix} --runs {options.runs} --steps {options.steps}"
    line += f" --threads {options.threads} --clock {options.clock} --parts {options.parts} --only '{options.only}'"
    write(name, line, {"threads": int(options.threads), "clock": options.clock, **table(found)})


if __name__ == "__main__":
    main()
