"""The whole service beside vLLM's: closed loop, 64 random tokens in and 64 out, greedy, at several numbers of streams.

    python -m benchmarks.cpu.service SHAPE [--runs 5] [--streams 1,8,32,64] [--rounds 4] [--only TEXT,…] [--each-step]
        [--fresh]

All servers stay up and are asked in turn, so that the machine's moods hit all of them; the load generators, alike by
gRPC and by HTTP, share the machine with them. --each-step adds those that send a message for each token. A measurement
is `rounds` requests of every stream, eight at least; a figure is the median over runs, a ratio that of ours to the best
peer. vLLM runs with the settings that `peer_settings` has found for the shape; where none were looked for, with one and
two threads in both formats. What has been measured is kept beside the checkpoints: a benchmark that was stopped goes on
where it was, --fresh begins again.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cpu.peer_settings import best_of, settings_path, start
from benchmarks.cpu.servers import Server, start_own, start_vllm
from benchmarks.cpu.shapes import CACHE
from benchmarks.machine import end_as_asked, median, write

FORMS = {"6.5M": ("float32", "bfloat16", "int8"), "61M": ("float32", "bfloat16", "int8"), "474M": ("bfloat16", "int8")}
PEER_FORMS = ("float32", "bfloat16")  # which of them is the faster depends on the machine
LEAST_REQUESTS = 8
OWN = "sluice"
EACH_STEP = ("--text-interval-ms", "0")

Key = tuple[int, str, int]  # run, server, streams
Found = dict[Key, dict[str, float]]


def start_all(shape: str, only: Sequence[str], log: Path, *, each_step: bool) -> Iterator[Server]:
    """Those whose names hold one of `only`; all without any."""
    for form in FORMS[shape]:
        if _wanted(f"{OWN} {form}", only):
            for more in ((), *((EACH_STEP,) * each_step)):
                yield start_own(shape, form, log, more)
    if settings_path(shape).exists():
        best = best_of(settings_path(shape))
        for settings in dict.fromkeys((best, *((dataclasses.replace(best, stream_interval=1),) * each_step))):
            if _wanted("vLLM", only) and (server := start(shape, settings, log)):
                yield server
        return
    for form, threads in itertools.product(PEER_FORMS, (1, 2)):
        if _wanted(f"vLLM {form}, {threads} thread", only) and (server := start_vllm(shape, form, threads, log)):
            yield server


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def measure(servers: Sequence[Server], options: argparse.Namespace, kept: Path, found: Found) -> None:
    """What is not found yet, in turn; each goes to the file at once."""
    streams = _numbers(options.streams)
    todo = [(run, level, one) for run in range(options.runs) for level in streams for one in servers]
    warm: set[str] = set()
    for at, (run, level, server) in enumerate(todo, 1):
        key = (run, server.name, level)
        if key in found:
            continue
        if server.name not in warm:
            warm.add(server.name)
            server.measure(max(streams), 2 * max(streams), 1)
        requests = max(LEAST_REQUESTS, options.rounds * level)
        found[key] = server.measure(level, requests, 1000 * run + level + 2)
        with kept.open("a") as file:
            file.write(json.dumps([*key, found[key]]) + "\n")
        rate, ttft = found[key]["tokens_per_s"], found[key]["ttft_ms"]
        about = f"run {run}, {level} streams, {server.name}"
        print(f"[{at}/{len(todo)}] {about}: {rate:.0f} tok/s, TTFT p50 {ttft:.1f} ms", flush=True)


def read(kept: Path) -> Found:
    """What an earlier run has measured."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(run, name, level): figures for run, name, level, figures in map(json.loads, lines)}


def table(found: Found, streams: Sequence[int]) -> dict[str, object]:
    """Medians over runs by server and streams, and ours against the best peer's."""
    names = sorted({name for _, name, _ in found})
    rows: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    for name in names:
        for level in streams:
            runs = [figures for (_, one, at), figures in found.items() if (one, at) == (name, level)]
            if runs:
                rows[name][str(level)] = {
                    **{key: round(median([one[key] for one in runs]), 1) for key in runs[0]},
                    **{
                        f"{key}_{which.__name__}": round(which(one[key] for one in runs), 1)
                        for key in runs[0]
                        for which in (min, max)
                    },
                }
    peers = [name for name in names if not name.startswith(OWN)]
    ratios: dict[str, dict[str, float]] = {}
    for name in (one for one in names if one.startswith(OWN)):
        for at, own in rows[name].items():
            best = max((rows[peer][at]["tokens_per_s"] for peer in peers if at in rows[peer]), default=0.0)
            if best:
                ratios.setdefault(name, {})[at] = round(own["tokens_per_s"] / best, 2)
    return {"servers": rows, "throughput_over_best_peer": ratios}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(FORMS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--result", help="name of the file in benchmarks/results; cpu_service_SHAPE")
    parser.add_argument("--each-step", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    result = options.result or f"cpu_service_{options.shape}"
    kept = CACHE / f"{result}-{options.rounds}.jsonl"
    if options.fresh:
        kept.unlink(missing_ok=True)
    found, servers = read(kept), []
    try:
        only = [one for one in options.only.split(",") if one]
        for server in start_all(options.shape, only, CACHE / "service.log", each_step=options.each_step):
            servers.append(server)
            print(f"{server.name}: ready", flush=True)
        measure(servers, options, kept, found)
    finally:
        for server in servers:
            server.stop()
    command = f"python -m benchmarks.cpu.service {options.shape} --runs {options.runs} --streams {options.streams}"
    command += f" --rounds {options.rounds}" + (f" --only '{options.only}'" if options.only else "")
    command += " --each-step" if options.each_step else ""
    settings = {"runs": options.runs, "rounds": options.rounds}
    figures = table(found, _numbers(options.streams))
    write(result, command, {**settings, **figures})


if __name__ == "__main__":
    main()
