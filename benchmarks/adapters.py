"""Measures adapters: what they add to a step, to a server that has them idle, and to one with more than its slots.

    python -m benchmarks.adapters [--shape 474M] [--rounds 5] [--threads 2] [--clock wall] [--only steps,idle,zipf,load]

One engine each, in bfloat16, random weights and adapters of rank 16 on all projections. What is compared takes turns,
and figures are medians of the ratios of each round: absolute times of a shared machine mean little, and drift.
`--threads 1 --clock cpu` is for machines that others use too: it takes CPU time, of the thread that computes for
`steps` and `idle`, of all threads for `zipf` and `load`, as if the one that reads had the same core.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.adapter_loads import loading
from benchmarks.adapter_rig import (
    CLOCKS,
    RANK,
    ROWS,
    SLOTS,
    Clock,
    asking,
    load,
    make_engine,
    modules_of_shape,
    tell,
    write_adapters,
)
from benchmarks.cpu.shapes import SHAPES
from benchmarks.machine import median, write
from sluice_server.engine.engine import Engine
from sluice_server.engine.request import AdapterRef


def step_s(engine: Engine, clock: Clock, adapters: Sequence[AdapterRef | None]) -> float:
    """The median time of a decode step of rows with these adapters."""
    for at, adapter in enumerate(adapters):
        engine.add(asking(f"{at:032x}", adapter))
    took = []
    while engine.has_work:
        start = clock()
        events = engine.step()
        if len(events.sampled) == len(adapters):
            took.append(clock() - start)
    return median(took[2:])


def in_turns(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The values of cases that take turns, by round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if number:
                found[name].append(value)
        tell(
            f"round {number} of {rounds}: "
            + ", ".join(f"{name} {value[-1] * 1e3:.2f} ms" for name, value in found.items() if value)
        )
    return found


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The median of what values are over others of the same rounds."""
    return round(median([one / other for one, other in zip(values, others, strict=True)]), 3)


def steps(shape: str, rounds: int, threads: int, clock: Clock) -> dict[str, object]:
    """A step of one adapter and of eight over one of the base."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), shape, SLOTS, RANK)
        engine = make_engine(shape, threads, Path(folder))
        refs = [load(engine, str(index)) for index in range(SLOTS)]
        figures: dict[str, object] = {}
        for rows in ROWS:
            cases = {
                "base": partial(step_s, engine, clock, [None] * rows),
                "1 adapter": partial(step_s, engine, clock, [refs[0]] * rows),
                "8 adapters": partial(step_s, engine, clock, [refs[at % SLOTS] for at in range(rows)]),
            }
            found = in_turns(cases, rounds)
            figures[f"{rows} rows"] = {
                "base_ms": round(median(found["base"]) * 1e3, 2),
                **{f"{name} over base": ratio(values, found["base"]) for name, values in found.items()},
            }
        tensors = sum(2 * RANK * (one.inputs + one.outputs) for one in modules_of_shape(shape))
        figures["bytes over its tensors"] = round(refs[0].num_bytes / tensors, 3)
        return figures


def idle(shape: str, rounds: int, threads: int, clock: Clock) -> dict[str, object]:
    """Base requests of an engine with adapters that none names, over one without."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), shape, 1, RANK)
        enabled, disabled = make_engine(shape, threads, Path(folder)), make_engine(shape, threads, None)
        load(enabled, "0")
        cases = {
            "disabled": lambda: step_s(disabled, clock, [None] * 8),
            "enabled": lambda: step_s(enabled, clock, [None] * 8),
        }
        found = in_turns(cases, rounds)
        return {"rate enabled over disabled": ratio(found["disabled"], found["enabled"])}


def load_run(
    engine: Engine, refs: Sequence[AdapterRef], order: Sequence[int], streams: int, clock: Clock
) -> tuple[float, float]:
    """Tokens a second of requests in that order of adapters, so many at once, and the p99 time to the first token."""
    waiting = [(f"{at:032x}", refs[adapter]) for at, adapter in enumerate(order)][::-1]
    sent: dict[str, float] = {}
    firsts: list[float] = []
    num, start = 0, clock()
    num_open = 0
    while waiting or engine.has_work:
        while waiting and num_open < streams:
            name, ref = waiting.pop()
            sent[name] = clock()
            engine.add(asking(name, ref))
            num_open += 1
        for event in engine.step().sampled:
            num += len(event.token_ids)
            if event.first_index == 0:
                firsts.append(clock() - sent[event.request_id])
            num_open -= event.finish is not None
    firsts.sort()
    return num / (clock() - start), firsts[int(len(firsts) * 0.99)]


def zipf(shape: str, rounds: int, threads: int, clock: Clock, num: int = 100) -> dict[str, object]:
    """A hundred adapters by Zipf where memory holds eight, and the others are read when they are named, over all of
    them in memory."""
    rng = random.Random(0)
    order = rng.choices(range(num), weights=[1 / (rank + 1) for rank in range(num)], k=160)
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), shape, num, 8)
        all_ = make_engine(shape, threads, Path(folder))
        refs = [load(all_, str(index)) for index in range(num)]
        few = make_engine(shape, threads, Path(folder), SLOTS * refs[0].num_bytes)
        for index in range(num):
            load(few, str(index))
        rates: dict[str, list[tuple[float, float]]] = {"few": [], "all": []}
        for number in range(rounds + 1):
            for name, engine in (("few", few), ("all", all_)):
                found = load_run(engine, refs, order, 32, clock if clock is CLOCKS["wall"] else time.process_time)
                if number:
                    rates[name].append(found)
                tell(f"round {number} of {rounds}, {name}: {found[0]:.0f} tok/s, p99 TTFT {found[1]:.2f} s")
        rate, first = ({key: median([one[at] for one in value]) for key, value in rates.items()} for at in (0, 1))
        return {
            "goodput over all resident": round(rate["few"] / rate["all"], 3),
            "p99 TTFT over all resident": round(first["few"] / first["all"], 2),
        }


PARTS: dict[str, Callable[[str, int, int, Clock], dict[str, object]]] = {
    "steps": steps,
    "idle": idle,
    "zipf": zipf,
    "load": loading,
}


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="474M", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--only", default=",".join(PARTS))
    asked = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name in asked.only.split(","):
        tell(f"{name}: begins")
        start = time.perf_counter()
        found[name] = PARTS[name](asked.shape, asked.rounds, asked.threads, CLOCKS[asked.clock])
        found[name]["seconds"] = round(time.perf_counter() - start)
        tell(f"{name}: {found[name]}")
    command = f"python -m benchmarks.adapters --shape {asked.shape} --rounds {asked.rounds} --threads {asked.threads}"
    write(f"adapters_{asked.shape}", f"{command} --clock {asked.clock} --only {asked.only}", {**found})


if __name__ == "__main__":
    main()
