"""Several models in one service, with real processes: what loading, sleeping, and having many costs those that serve.

    python -m benchmarks.models [--only gaps wakes lanes turns] [--runs 5] [--turn-s 60] [--loaded SHAPE]

gaps: p99 of the time between two messages of model A's streams while model B loads, over that before; of a load of a
third of a second that is the longest or the second, so `--loaded` has B be one of `cpu.shapes`. wakes: from a
request for a model that sleeps, at each level, to its answer, over the first token of a service from a cold start.
lanes: the gateway's CPU a token with 8 models over one, the engines computing nothing, and its CPU a second without
requests. turns: two models with memory for one and four clients that alternate. On a busy machine only ratios within a
run mean something. Each run prints a line; all parts take about seven minutes.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import sluice
from sluice.v1 import inference_pb2

from benchmarks import cold_start, gateway_client
from benchmarks.cpu.servers import served
from benchmarks.cpu.shapes import SHAPES
from benchmarks.machine import end_as_asked, median, write
from tests.system.service import Service, generate, serve, spec, wait_until
from tests.system.test_model_turns import Alternating, crowded
from tests.system.test_system_models import checkpoints

Figures = dict[str, object]
CACHE = ("--kv-cache-tokens", "8192", "--max-num-seqs", "16")
LENGTH, STREAMS = 64, 4
QUIET_S = 5.0
NUM_LANES = 8
NUM_ENGINES = (4, 8)
LANE_STREAMS, LANE_TOKENS, STEP_S = 256, 100, 0.05  # as `benchmarks.gateway` paces its streams
IDLE_S = 5.0


@contextlib.contextmanager
def several(
    names: list[str], *options: str, within: tuple[str, ...] = (), others: Mapping[str, Path] | None = None
) -> Iterator[Service]:
    """A service of copies of the demo model, and of other checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(Path(folder), *names)
        sources = {name: Path(folder) / name for name in names} | dict(others or {})
        file = Path(folder) / "models.toml"
        file.write_text("\n".join(f'[models.{name}]\nsource = "{source}"' for name, source in sources.items()))
        own = ("--models", str(file), "--models-dir", folder, *options)
        with open(os.devnull, "w") as log, serve(*own, log=log, within=within) as service:
            with sluice.Client(service.address) as client:
                wait_until(lambda: all(one.state == 2 for one in client.models()), 180, "all models serve")
            yield service


class Streams:
    """Clients that stream one generation after the other from a model until they are stopped."""

    def __init__(self, service: Service, model: str, num: int) -> None:
        self.gaps: list[tuple[float, float]] = []  # when each ended, and its seconds
        self._service, self._model = service, model
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self, at: int) -> None:
        with self._service.stub() as stub:
            for number in itertools.count():
                if self._is_over.is_set():
                    return
                wanted = spec(f"def f{at}_{number}(", LENGTH)
                wanted.model = self._model
                times = [
                    time.monotonic()
                    for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120)
                    if event.WhichOneof("event") == "delta"
                ]
                self.gaps += [(later, later - earlier) for earlier, later in itertools.pairwise(times)]

    def end(self) -> None:
        """Stops them."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def p99_ms(self, since_s: float, until_s: float) -> float:
        """The p99 of the gaps that ended within the interval."""
        gaps = sorted(seconds for end_s, seconds in self.gaps if since_s <= end_s <= until_s)
        return gaps[int(len(gaps) * 0.99)] * 1e3


def gaps(options: argparse.Namespace) -> Figures:
    """Gaps of a model's streams while another one loads."""
    before, meanwhile, loads = [], [], []
    names, others = (["home"], {"other": served(options.loaded)}) if options.loaded else (["home", "other"], {})
    with several(names, *CACHE, others=others) as service, sluice.Client(service.address) as client:
        for _ in range(options.runs):
            client.sleep_model("other")
            streams = Streams(service, "home", STREAMS)
            time.sleep(QUIET_S)
            start_s = time.monotonic()
            client.wake_model("other", timeout_s=120)
            end_s = time.monotonic()
            streams.end()
            before.append(streams.p99_ms(start_s - QUIET_S + 1, start_s))
            meanwhile.append(streams.p99_ms(start_s, end_s))
            loads.append(end_s - start_s)
            _say("gaps", before_ms=before[-1], meanwhile_ms=meanwhile[-1], load_s=loads[-1])
    return {
        "streams": STREAMS,
        "gap_p99_ms": round(median(before), 2),
        "gap_p99_ms_while_loading": round(median(meanwhile), 2),
        "gap_p99_ratio": round(median([one / other for one, other in zip(meanwhile, before, strict=True)]), 3),
        "load_beside_streams_s": round(median(loads), 2),
    }


def wakes(options: argparse.Namespace) -> Figures:
    """From a request for a model that sleeps to its answer, beside a cold start."""
    found: dict[int, list[float]] = {1: [], 2: []}
    colds: list[float] = []
    with several(["home", "other"], *CACHE) as service, sluice.Client(service.address) as client:
        for _ in range(options.runs):  # by turns, as other work comes and goes
            for level, took in found.items():
                took.append(_woken_s(service, client, level))
            colds.append(cold_start.measure()[1])
            _say("wakes", **{f"level_{level}_s": took[-1] for level, took in found.items()}, cold_s=colds[-1])
    cold_s = median(colds)
    figures: Figures = {"cold_start_s": round(cold_s, 2)}
    for level, took in found.items():
        figures[f"wake_{level}_s"] = round(median(took), 2)
        ratios = [one / cold for one, cold in zip(took, colds, strict=True)]
        figures[f"wake_{level}_of_cold_start"] = round(median(ratios), 2)
    return figures


def _woken_s(service: Service, client: sluice.Client, level: int) -> float:
    client.sleep_model("other", level=level)
    if level > 1:
        wait_until(lambda: not any(name.startswith("m1-") for name in service.children()), 60, "it has no processes")
    wanted = spec("def f(", 1)
    wanted.model = "other"
    start_s = time.monotonic()
    with service.stub() as stub:
        generate(stub, wanted)
    return time.monotonic() - start_s


def lanes(options: argparse.Namespace) -> Figures:
    """The gateway's CPU a token: one model alone, one of eight that are there, all eight, and one of four or of
    eight engines, which answer at as many times; and its CPU while nothing is asked.

    A gateway that is late gets several tokens of a stream as one message, which cost it hardly more than one: so a
    token is what its time is divided by.
    """
    names = [f"m{at}" for at in range(NUM_LANES)]
    os.environ["FAKE_STEP_S"] = str(STEP_S)
    sizes = ("--kv-cache-tokens", "65536", "--max-num-seqs", str(LANE_STREAMS), "--max-open-requests", "512")
    costs: dict[str, list[Cost]] = {}
    idle: dict[str, list[float]] = {"one": [], "8": []}
    with contextlib.ExitStack() as running:
        alone = running.enter_context(_computing_nothing(names[:1], *sizes))
        many = running.enter_context(_computing_nothing(names, *sizes))
        ways = {
            "one": (alone, names[:1]),
            "one_of_8": (many, names[:1]),
            "all_8": (many, names),
        }
        for num in NUM_ENGINES:
            wide = running.enter_context(_computing_nothing(names[:1], *sizes, "--engines", str(num)))
            ways[f"{num}_engines"] = wide, names[:1]
        for service, models in ways.values():
            asyncio.run(_streamed(service, models))  # warm
        for run in range(options.runs):
            for way, (service, models) in list(ways.items())[:: -1 if run % 2 else 1]:  # none is always the first
                costs.setdefault(way, []).append(asyncio.run(_streamed(service, models)))
            idle["one"].append(_idle_ms_per_s(alone))
            idle["8"].append(_idle_ms_per_s(many))
            _say("lanes", **{f"{way}_us": runs[-1].us_per_token for way, runs in costs.items()})
    figures: Figures = {"lane_streams": LANE_STREAMS, "tokens_per_s_each": round(1 / STEP_S)}
    for way, runs in costs.items():
        figures[f"gateway_us_per_token_{way}"] = round(median([run.us_per_token for run in runs]), 1)
        figures[f"tokens_per_message_{way}"] = round(median([run.tokens_per_message for run in runs]), 2)
        ratios = [mine.us_per_token / base.us_per_token for mine, base in zip(runs, costs["one"], strict=True)]
        figures[f"gateway_cpu_ratio_{way}"] = round(median(ratios), 3)
    return figures | {f"gateway_idle_ms_per_s_{way}": round(median(found), 1) for way, found in idle.items()}


def _idle_ms_per_s(service: Service) -> float:
    """Milliseconds of CPU that a gateway takes a second while nothing is asked of it."""
    gateway = service.children()["gateway-0"]
    before = sum(gateway.cpu_times()[:2])
    time.sleep(IDLE_S)
    return float(sum(gateway.cpu_times()[:2]) - before) * 1e3 / IDLE_S


@contextlib.contextmanager
def _computing_nothing(names: list[str], *options: str) -> Iterator[Service]:
    with several(names, *options, within=(sys.executable, "-m", "benchmarks.lane_engines")) as service:
        yield service


class Cost(NamedTuple):
    """What streams cost a gateway: microseconds of its CPU a token, and how many tokens a message had."""

    us_per_token: float
    tokens_per_message: float


async def _streamed(service: Service, models: list[str]) -> Cost:
    """Has clients stream from the models, and returns what that cost the gateway."""
    gateway = service.children()["gateway-0"]
    async with gateway_client.connected(service.address) as stubs:
        rng = random.Random(0)

        async def read(at: int) -> list[int]:
            wanted = gateway_client.spec(LANE_TOKENS, rng)
            wanted.model = models[at % len(models)]
            call = stubs[at % len(stubs)].StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted))
            return [event.delta.consumed async for event in call if event.delta.consumed]

        before, start_s = sum(gateway.cpu_times()[:2]), time.monotonic()
        streams = await asyncio.gather(*[read(at) for at in range(LANE_STREAMS)])
        took_us = float(sum(gateway.cpu_times()[:2]) - before) * 1e6
    # Engines that compute could be faster, and would take the processors from the gateway that is measured.
    assert time.monotonic() - start_s >= (LANE_TOKENS - 1) * STEP_S, "the engines do not wait out their steps"
    tokens = sum(map(sum, streams))
    return Cost(took_us / tokens, tokens / sum(map(len, streams)))


def turns(options: argparse.Namespace) -> Figures:
    """Two models with memory for one, and four clients that ask for one and the other."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with crowded(Path(folder), log) as service:
            start_s = time.monotonic()
            clients = Alternating(service, 4)
            time.sleep(options.turn_s)
            clients.end()
            took_s = time.monotonic() - start_s
        lines = log.read_text().splitlines()
    wakes_s = [float(line.split()[-2]) for line in lines if " serves after " in line]
    loads = sum(line.endswith(" wakes") for line in lines)
    return {
        "turns_s": round(took_s),
        "requests": len(clients.waits),
        "failed": len(clients.errors),
        "loads": loads,
        "loads_per_request": round(loads / len(clients.waits), 3),
        "turn_load_s": round(median(wakes_s), 2),
        "longest_wait_s": round(max(clients.waits), 1),
        "longest_wait_of_load": round(max(clients.waits) / median(wakes_s), 2),
    }


def _say(part: str, **found: float) -> None:
    """Prints what a run of a part has found."""
    print(part, *[f"{name}={value:.3g}" for name, value in found.items()], flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "gaps": gaps,
    "wakes": wakes,
    "lanes": lanes,
    "turns": turns,
}


def main() -> None:
    """Measures and writes the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=60.0, help="of the alternating clients; 300 is the goal's")
    parser.add_argument("--loaded", choices=SHAPES, help="what loads in gaps, with random weights; the demo model else")
    options = parser.parse_args()
    figures: Figures = {}
    for name in options.only:
        figures |= PARTS[name](options)
        print(name, figures, flush=True)
    if options.only == [*PARTS]:
        write("models", f"python -m benchmarks.models --runs {options.runs} --turn-s {options.turn_s:g}", figures)


if __name__ == "__main__":
    main()
