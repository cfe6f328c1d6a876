"""The requests a second that keep goals for latency, ours beside vLLM's: arrivals at random times, whatever has become
of those before. By HTTP, and ours by gRPC too.

    python -m benchmarks.cpu.open_load [--shape 61M] [--form float32] [--trace FILE] [--rounds 5] [--seconds 12]
                                       [--only goodput,burst] [--servers sluice,vLLM] [--slots 128] [--guess 6]
                                       [--fresh]

Goals: p95 of the time to the first token below 200 ms, and of the time per token behind it below 50 ms. A round finds
the highest rate that keeps both by bisection, of every server in turn, with the same requests for all; goodput is the
rate of those that keep both goals there. Lengths are drawn like ShareGPT's, a quarter as long, or from --trace (of
Mooncake or Azure), scaled to the model. `burst`: a fifth of that rate, and ten times as much for a second: how long
first tokens stay late. vLLM runs with the settings that `peer_settings` has found, and both compute as many sequences
at once as --slots says, by default as vLLM's server on a CPU: with 64, ours has none free long before a token takes
50 ms. What has been measured is kept beside the checkpoints: a benchmark that was stopped goes on where it was, --fresh
begins again.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.cpu.goodput import Flight, Goals, Trial, burst_times, highest, over_after, quantile, trial_of
from benchmarks.cpu.load_lengths import Lengths, from_trace, sharegpt
from benchmarks.cpu.open_loop import Connect, GiveUp, completions, hopeless, never, play
from benchmarks.cpu.peer_settings import start_best
from benchmarks.cpu.servers import Server, start_own
from benchmarks.cpu.shapes import CACHE, SHAPES
from benchmarks.machine import end_as_asked, median, write
from sluice_server.services.cli.load import arrival_times

GOALS = Goals()
LEAST = 20  # requests of a trial: one of them may be late
REST_S = 1.0  # between two trials: what was cut off is forgotten
BASE, BURST, BURST_S = 0.2, 10.0, 1.0  # of the highest rate; over the base; seconds of it
BEFORE_S, AFTER_S = 6.0, 6.0
OWN, PEER = "sluice", "vLLM"
HTTP = "HTTP"

Row = dict[str, float]
Found = dict[tuple[str, int, str], Row]  # kind, round, contestant


@dataclasses.dataclass(frozen=True, slots=True)
class Contestant:
    """A way to ask a server."""

    name: str
    server: Server
    connect: Connect


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What all trials have in common."""

    shape: str
    lengths: Lengths
    seconds: float
    runner: asyncio.Runner  # of one event loop: gRPC keeps to the first one of a process

    def fly(self, one: Contestant, times: Sequence[float], seed: int, give_up: GiveUp = never) -> list[Flight]:
        """Sends requests at these times."""
        work = completions(len(times), self.lengths, SHAPES[self.shape].vocab_size, seed)
        with one.server.awake():
            time.sleep(REST_S)
            return self.runner.run(play(one.connect, times, work, give_up))

    def warm(self, one: Contestant) -> None:
        """Sends some requests: what slept for minutes while others were measured is slow to answer the first ones."""
        self.fly(one, arrival_times(16, 8.0, 1), 1)

    def trial(self, one: Contestant, rate: float, seed: int) -> Trial:
        """Arrivals at a rate."""
        times = arrival_times(max(LEAST, round(rate * self.seconds)), rate, seed)
        flights = self.fly(one, times, seed, hopeless(len(times), GOALS))
        found = trial_of(rate, len(times), max(self.seconds, times[-1]), flights, GOALS)
        print(f"  {one.name}: {_shown(found)}", flush=True)
        return found

    def limit(self, one: Contestant, start: float, seed: int) -> Row:
        """The highest rate that keeps the goals, and what it was like."""
        self.warm(one)
        trials: list[Trial] = []

        def passes(rate: float) -> bool:
            trials.append(self.trial(one, rate, seed))
            return trials[-1].passes

        rate = highest(passes, start)
        best = next((trial for trial in trials if trial.rate == rate and trial.passes), None)
        if best is None:
            return {"rate": 0.0, "goodput": 0.0}
        figures = {"ttft_p50_ms": best.ttft_p50, "ttft_p95_ms": best.ttft_p95, "tpot_p95_ms": best.tpot_p95}
        return {
            "rate": round(rate, 3),
            "goodput": round(best.goodput, 3),
            **{name: round(value * 1e3, 1) for name, value in figures.items()},
        }

    def burst(self, one: Contestant, limit: float, seed: int) -> Row:
        """First tokens before a burst and behind it."""
        self.warm(one)
        base, end = limit * BASE, BEFORE_S + BURST_S
        usual = arrival_times(max(8, round(base * (end + AFTER_S))), base, seed)
        extra = arrival_times(max(1, round((BURST - 1) * base * BURST_S)), (BURST - 1) * base, seed + 1)
        flights = self.fly(one, burst_times(usual, extra, BEFORE_S), seed)
        start = flights[0].due - min(usual[0], BEFORE_S)
        before = [flight.ttft for flight in flights if flight.due - start < BEFORE_S]
        within = [flight.ttft for flight in flights if BEFORE_S <= flight.due - start < end]
        return {
            "base_rate": round(base, 2),
            "p99_before_ms": round(quantile(before, 0.99) * 1e3, 1),
            "p99_within_ms": round(quantile(within, 0.99) * 1e3, 1),
            "late_for_s": round(over_after(flights, start + end, GOALS.ttft), 2),
            "errors": sum(bool(flight.error) for flight in flights),
        }


def contestants(servers: Sequence[Server]) -> Iterator[Contestant]:
    """All ways to ask these."""
    for server in servers:
        for way, connect in sorted(server.ways.items(), reverse=True):
            yield Contestant(f"{server.name}, {way}", server, connect)


def measure(bench: Bench, all_of: Sequence[Contestant], options: argparse.Namespace, kept: Path, found: Found) -> None:
    """What is not found yet, in turn; each goes to the file at once."""

    def keep(kind: str, number: int, one: Contestant, make: Callable[[], Row]) -> None:
        if (kind, number, one.name) in found:
            return
        row = found[kind, number, one.name] = make()
        with kept.open("a") as file:
            file.write(json.dumps([kind, number, one.name, row]) + "\n")
        print(f"{kind} {number}, {one.name}: {row}", flush=True)

    for number in range(options.rounds):
        for one in all_of:
            start = limit_of(found, one.name) or options.guess
            if "goodput" in options.only:
                keep("goodput", number, one, partial(bench.limit, one, start, 100 * number + 7))
            if "burst" in options.only and (limit := limit_of(found, one.name)):
                keep("burst", number, one, partial(bench.burst, one, limit, 100 * number + 50))


def limit_of(found: Mapping[tuple[str, int, str], Row], name: str) -> float:
    """The median of the rates found so far; 0 without any."""
    rates = [row["rate"] for (kind, _, one), row in found.items() if (kind, one) == ("goodput", name)]
    return median(rates) if rates else 0.0


def read(kept: Path) -> Found:
    """What an earlier run has measured."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(kind, number, name): row for kind, number, name, row in map(json.loads, lines)}


def table(found: Found) -> dict[str, object]:
    """Medians and spread over rounds, and our goodput over the peer's in the same round."""
    figures: dict[str, object] = {}
    for kind in sorted({kind for kind, _, _ in found}):
        names = sorted({name for of, _, name in found if of == kind})
        figures[kind] = {
            name: summed([row for (of, _, one), row in found.items() if (of, one) == (kind, name)]) for name in names
        }
    figures["goodput_over_peer"] = ratios(found)
    return figures


def summed(rows: Sequence[Row]) -> dict[str, object]:
    """The median of each figure, and its values by round."""
    keys = [key for key in rows[0] if all(key in row for row in rows)]
    medians = {key: round(median([row[key] for row in rows]), 3) for key in keys}
    return {**medians, "rounds": {key: [row[key] for row in rows] for key in keys}}


def ratios(found: Found) -> dict[str, object]:
    """Of each of our ways: the median over rounds, the least and the most."""
    peers = [name for kind, _, name in found if kind == "goodput" and name.startswith(PEER)]
    best: dict[int, float] = {}
    for kind, number, name in found:
        if kind == "goodput" and name in peers:
            best[number] = max(best.get(number, 0.0), found[kind, number, name]["goodput"])
    by_name: dict[str, list[float]] = {}
    for (kind, number, name), row in found.items():
        if kind == "goodput" and name.startswith(OWN) and best.get(number):
            by_name.setdefault(name, []).append(row["goodput"] / best[number])
    return {
        name: {"median": round(median(each), 2), "least": round(min(each), 2), "most": round(max(each), 2)}
        for name, each in by_name.items()
    }


def _shown(trial: Trial) -> str:
    times = f"TTFT p95 {_ms(trial.ttft_p95)}, TPOT p95 {_ms(trial.tpot_p95)}"
    errors = f", {trial.errors} errors" if trial.errors else ""
    return f"{trial.rate:.2f}/s {'keeps' if trial.passes else 'misses'} the goals: {times}{errors}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if math.isfinite(seconds) else "never"


def start_all(options: argparse.Namespace) -> Iterator[Server]:
    """Those whose names begin with one that is asked for."""
    log, slots = CACHE / "open_load.log", ("--max-num-seqs", str(options.slots))
    if OWN in options.servers:
        yield start_own(options.shape, options.form, log, (*slots, "--http", "127.0.0.1:0"))
    if PEER in options.servers and (server := start_best(options.shape, log, slots)) is not None:
        yield server


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=tuple(SHAPES))
    parser.add_argument("--form", default="float32")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--only", default="goodput,burst")
    parser.add_argument("--servers", default=f"{OWN},{PEER}")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--guess", type=float, default=6.0, help="requests a second at which the first search begins")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    name = f"cpu_open_load_{options.shape}" + (f"_{options.trace.stem}" if options.trace else "")
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / f"{name}.jsonl"
    if options.fresh:
        kept.unlink(missing_ok=True)
    lengths = from_trace(options.trace) if options.trace else sharegpt()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    bench = Bench(options.shape, lengths, options.seconds, runner)
    found, servers = read(kept), []
    try:
        for server in start_all(options):
            servers.append(server)
            print(f"{server.name}: ready", flush=True)
        all_of = list(contestants(servers))
        for one in all_of:
            bench.warm(one)
        measure(bench, all_of, options, kept, found)
    finally:
        for server in servers:
            server.stop()
        runner.close()
    line = f"python -m benchmarks.cpu.open_load --shape {options.shape} --form {options.form}"
    line += f" --rounds {options.rounds} --seconds {options.seconds:g} --slots {options.slots}"
    line += f" --trace {options.trace.name}" if options.trace else ""
    source = options.trace.name if options.trace else "as ShareGPT's, a quarter as long"
    write(name, line, {"lengths": source, **table(found)})


if __name__ == "__main__":
    main()
