"""Compares the whole service with its engine alone, closed loop, and measures the CPU time of the other stages.

    python -m benchmarks.whole_service [--runs 5] [--streams 32] [--requests 96]

Demo model, 64 tokens in and 64 out, random ids, greedy. The engine alone runs the same requests, `streams` at a time,
in a process of its own settings. Both are measured in turn; the load generator shares the machine with the service.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.machine import end_as_asked, median, write

LENGTH = 64
SERVE = (sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning")
ENGINE_ALONE = "--engine-alone"


def engine_alone(streams: int, requests: int) -> float:
    """Output tokens per second of the engine alone, in this process."""
    from sluice_server.engine.build import build_engine
    from sluice_server.engine.config import EngineConfig
    from sluice_server.engine.models.config import read_config
    from sluice_server.engine.models.limits import limits_of
    from sluice_server.engine.request import EngineRequest, SamplingParams
    from sluice_server.services.checkpoint.model_source import resolve_model

    directory, config = resolve_model("demo", "").directory, EngineConfig()
    model = read_config(directory)
    engine = build_engine(config, model, directory, limits_of(config, model, 1 << 20)).engine
    rng = random.Random(0)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    waiting = [tuple(rng.randrange(model.vocab_size) for _ in range(LENGTH)) for _ in range(requests + streams)]

    def run(num: int) -> float:
        start, added, done = time.perf_counter(), 0, 0
        while done < num:
            while added < num and added - done < streams:
                engine.add(EngineRequest(f"{len(waiting):032x}", waiting.pop(), params))
                added += 1
            done += sum(event.finish is not None for event in engine.step().sampled)
        return num * LENGTH / (time.perf_counter() - start)

    run(streams)
    return run(requests)


def whole_service(streams: int, requests: int) -> tuple[float, dict[str, float]]:
    """Output tokens per second, and microseconds of CPU per token of each process."""
    with (
        subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as service,
        tempfile.TemporaryDirectory() as scratch,
    ):
        assert service.stdout is not None
        address = service.stdout.readline().split(" on ")[1].split(",")[0]
        bench = [sys.executable, "-m", "sluice_server", "bench", "--address", address]
        bench += ["--concurrency", str(streams), "--input-len", str(LENGTH), "--output-len", str(LENGTH)]
        children = {" ".join(c.cmdline()): c for c in psutil.Process(service.pid).children()}
        subprocess.run([*bench, "--requests", str(streams)], check=True, stdout=subprocess.DEVNULL)
        before = {name: sum(child.cpu_times()[:2]) for name, child in children.items()}
        result = Path(scratch) / "bench.json"
        command = [*bench, "--requests", str(requests), "--warmup", "0", "--seed", "1", "--json", str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        used = {name: sum(child.cpu_times()[:2]) - before[name] for name, child in children.items()}
        service.send_signal(signal.SIGTERM)
        figures = json.loads(result.read_text())
    tokens = figures["output_tokens"]
    microseconds = {name.removeprefix("sluice: ").strip(): time_s / tokens * 1e6 for name, time_s in used.items()}
    return figures["output_tokens_per_s"], microseconds


def main() -> None:
    """Measure in turn and write the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument(ENGINE_ALONE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine_alone:
        print(engine_alone(options.streams, options.requests))
        return
    own = [sys.executable, "-m", "benchmarks.whole_service", ENGINE_ALONE]
    own += ["--streams", str(options.streams), "--requests", str(options.requests)]
    alone, service, others = [], [], []
    by_process: dict[str, list[float]] = {}
    for _ in range(options.runs):
        alone.append(float(subprocess.run(own, check=True, capture_output=True, text=True, env=os.environ).stdout))
        rate, used = whole_service(options.streams, options.requests)
        service.append(rate)
        others.append(sum(value for name, value in used.items() if not name.startswith("engine")))
        for name, value in used.items():
            by_process.setdefault(name, []).append(value)
        print(f"alone {alone[-1]:.0f} tok/s, service {rate:.0f}, other stages {others[-1]:.0f} µs/token", flush=True)
    ratios = [whole / bare for whole, bare in zip(service, alone, strict=True)]
    command = f"python -m benchmarks.whole_service --runs {options.runs} --streams {options.streams}"
    figures: dict[str, object] = {
        "engine_alone_tokens_per_s": round(median(alone), 1),
        "service_tokens_per_s": round(median(service), 1),
        "ratio": round(median(ratios), 3),
        "other_stages_cpu_us_per_token": round(median(others), 1),
        "cpu_us_per_token": {name: round(median(values), 1) for name, values in sorted(by_process.items())},
    }
    write("whole_service", f"{command} --requests {options.requests}", figures)


if __name__ == "__main__":
    main()
