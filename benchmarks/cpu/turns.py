"""Two models with memory for one of them, and clients that ask for one and the other, beside llama.cpp's router.

    python -m benchmarks.cpu.turns [--shape 61M] [--clients 4] [--seconds 60] [--runs 3]

Each client sends 64 random tokens by HTTP, reads 8, and asks the other model next. Here `--memory-budget` has room for
one of the two beside a small default model; there it is `--models-max 1`. Both have the same number of slots, float32
and files that the kernel has cached. Servers take turns; one that is idle computes nothing. A request that is refused
or cut off is counted, and its client goes on.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from benchmarks.cpu.adapters import write_llama_files
from benchmarks.cpu.goodput import Flight, quantile
from benchmarks.cpu.http_load import connections
from benchmarks.cpu.open_loop import Completion
from benchmarks.cpu.servers import LENGTH, Server, run_own, served, start_llama
from benchmarks.cpu.shapes import CACHE, SHAPES
from benchmarks.machine import end_as_asked, median, write
from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.planned import front_bytes, with_plans
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.model_table import LaneEntry, Options

MODELS = ("left", "right")
SLOTS, CONTEXT, NUM_TOKENS = 8, 256, 8
SETTINGS: Options = {"kv_cache_tokens": SLOTS * CONTEXT, "max_num_seqs": SLOTS, "dtype": "float32"}
PAUSE_S = 0.05  # of a client behind an error


class Contestant:
    """A server of both models, and the loads in its log: lines with `word`."""

    def __init__(self, name: str, server: Server, log: Path, word: str) -> None:
        self.name, self.server = name, server
        self._log, self._word = log, word

    def num_loads(self) -> int:
        """The loads so far."""
        return sum(self._word in line for line in self._log.read_text(errors="replace").splitlines())


def own(options: argparse.Namespace, folder: Path) -> Iterator[Contestant]:
    """`sluice serve`."""
    demo, weights = str(resources.files("sluice_server.demo") / "target"), str(served(options.shape))
    plans = [LaneEntry("home", demo, options=SETTINGS), LaneEntry("left", weights, options=SETTINGS)]
    home, left = with_plans(EngineConfig(), ServiceConfig(), plans)
    budget = front_bytes(ServiceConfig(http="127.0.0.1:0")) + home.planned.total + int(1.5 * left.planned.total)
    settings = "".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
    sources = {"home": demo} | dict.fromkeys(MODELS, weights)
    tables = [f'[models.{name}]\nsource = "{it}"\n[models.{name}.settings]\n{settings}' for name, it in sources.items()]
    file, log = folder / "models.toml", CACHE / "turns.log"
    file.write_text("\n".join(tables))
    line = ("--models", str(file), "--http", "127.0.0.1:0", "--memory-budget", str(budget))
    yield Contestant("sluice", run_own("sluice", line, log, SHAPES[options.shape].vocab_size), log, " wakes")


def llama(options: argparse.Namespace, folder: Path) -> Iterator[Contestant]:
    """llama.cpp's server as a router of instances of itself."""
    if not write_llama_files(options.shape, folder, 0):
        return
    models, log = folder / "gguf", CACHE / "turns_llama.log"
    models.mkdir()
    for name in MODELS:
        os.link(folder / "base.gguf", models / f"{name}.gguf")
    slots = ("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT), "--log-file", str(log))
    line = ("--models-dir", str(models), "--models-max", "1", *slots)
    server = start_llama(line, SHAPES[options.shape].vocab_size, CACHE / "turns_llama.errors")
    if server is not None:
        yield Contestant("llama.cpp", server, log, "spawning server instance with name=")


async def alternate(port: int, options: argparse.Namespace, seed: int) -> list[Flight]:
    """What became of the requests of all clients."""
    flights: list[Flight] = []
    until = time.perf_counter() + options.seconds

    async def client(rng: random.Random) -> None:
        for model in itertools.cycle(MODELS):
            if time.perf_counter() > until:
                return
            prompt = [rng.randrange(3, 1000) for _ in range(LENGTH)]
            flight = Flight(time.perf_counter(), NUM_TOKENS)
            flights.append(flight)
            try:
                async with connections(port, model, keeps=False) as send:
                    await send(Completion(prompt, NUM_TOKENS), flight)
            except (OSError, ValueError) as error:
                flight.error = str(error).splitlines()[0] if str(error) else type(error).__name__
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(client(random.Random(seed + at)) for at in range(options.clients)))
    return flights


def measured(one: Contestant, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """The figures of a turn."""
    before, start_s = one.num_loads(), time.perf_counter()
    with one.server.awake():
        flights = asyncio.run(alternate(one.server.port, options, seed))
    took_s, loads = time.perf_counter() - start_s, one.num_loads() - before
    ended = [flight.end - flight.due for flight in flights if not flight.error]
    for error in sorted({flight.error for flight in flights if flight.error}):
        print(f"{one.name}: {error}", flush=True)
    return {
        "requests": len(flights),
        "failed": len(flights) - len(ended),
        "requests_per_s": round(len(ended) / took_s, 2),
        "loads": loads,
        "loads_per_request": round(loads / max(1, len(ended)), 3),
        "wait_s_p50": round(quantile(ended, 0.5), 3),
        "wait_s_p95": round(quantile(ended, 0.95), 3),
        "wait_s_longest": round(max(ended, default=float("nan")), 3),
    }


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=sorted(SHAPES))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    end_as_asked()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        contestants: list[Contestant] = []
        for start in (own, llama):
            for one in start(options, folder):  # one that does not start leaves none of the others behind
                contestants.append(one)
                stack.callback(one.server.stop)
        for run in range(options.runs):
            for one in contestants:
                figures = measured(one, options, 1000 * run)
                found.setdefault(one.name, []).append(figures)
                print(f"run {run}, {one.name}: {figures}", flush=True)
    table: dict[str, object] = {
        name: {key: median([run[key] for run in runs]) for key in runs[0]} for name, runs in found.items()
    }
    command = (
        f"python -m benchmarks.cpu.turns --shape {options.shape} --seconds {options.seconds:.0f} --runs {options.runs}"
    )
    write(f"cpu_turns_{options.shape}", command, table)


if __name__ == "__main__":
    main()
