"""Measures the cost of telemetry: throughput with every request traced, and steps with a collector that accepts
connections and does not answer.

    python -m benchmarks.telemetry [--model demo] [--rounds 20] [--streams 64] [--requests N] [--all]

64 tokens in and 64 out, closed loop. Services stand side by side: with metrics to be fetched (plain), with
traces and metrics to a collector too, with the same to a black hole. Each round loads one after the other, in an order
that changes, for as long as `requests` take. The collector answers without reading, lest its own work be charged.
Ratios are medians of those within a round, as the machine changes from one to the next. Steps are the engine's own: its
histogram has buckets of one percent here (fine_steps); beside the medians, the percentiles of all rounds together.
Processor time is that of the four processes: it says the same on a machine that others use too.

With `--all` the services are: one without any telemetry, one that logs a line in JSON for each request, one with
traces, and one with both, metrics that are fetched as a Prometheus does, and an audit log, which gets a line at
each fetch. Microseconds of a request by process are printed, too.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
from sluice.v1 import control_pb2, control_pb2_grpc

from benchmarks.machine import end_as_asked, median, write

LENGTH = 64
SERVE = (sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0")
QUIET = ("--log-level", "error")
LINES = ("--log-level", "info", "--log-format", "json", "--log-requests")
BENCH = (sys.executable, "-m", "sluice_server", "bench", "--input-len", str(LENGTH), "--output-len", str(LENGTH))
PORT = 19464  # the first of metrics
FETCH_S = 15.0
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
BUCKET = re.compile(r'^sluice_engine_step_time_seconds_bucket{(?:.*,)?le="([^"]+)".*} (\S+)$', re.M)


class Sink(grpc.GenericRpcHandler):
    """Answers every export at once."""

    def __init__(self) -> None:
        self.num = 0
        self.num_bytes = 0

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """One handler for all methods."""
        return grpc.unary_unary_rpc_method_handler(self._take)

    def _take(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num += 1
        self.num_bytes += len(request)
        return b""


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Sink]]:
    """An endpoint that takes everything."""
    sink = Sink()
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((sink,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", sink
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@dataclasses.dataclass(frozen=True)
class Steps:
    """Times of steps: how many took at most so many seconds."""

    at_most: Counter[float]

    def since(self, before: "Steps") -> "Steps":
        """Those that came after `before`."""
        return Steps(Counter({bound: num - before.at_most[bound] for bound, num in self.at_most.items()}))

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(Counter({bound: num + other.at_most[bound] for bound, num in self.at_most.items()}))

    def percentile_ms(self, share: float) -> float:
        """Upper end of the bucket in which it lies."""
        wanted = share * self.at_most[math.inf]
        return 1e3 * next(bound for bound, num in sorted(self.at_most.items()) if num >= wanted)


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """What one load of one service brought."""

    tokens_per_s: float
    steps: Steps
    cpu_s_of: dict[str, float]  # of each process

    @property
    def cpu_s(self) -> float:
        """Processor time of all processes."""
        return sum(self.cpu_s_of.values())


@dataclasses.dataclass(frozen=True)
class Service:
    """A running service, its processes, and the port of its engine's metrics, the first of four; 0 without metrics."""

    address: str
    processes: list[psutil.Process]
    metrics_port: int

    def load(self, streams: int, requests: int) -> LoadResult:
        """So many requests, at most `streams` at once."""
        before, cpu_before_s = self.steps(), self.cpu_s()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            more = ["--concurrency", str(streams), "--requests", str(requests), "--warmup", "0", "--json", file.name]
            subprocess.run([*BENCH, "--address", self.address, *more], check=True, stdout=subprocess.DEVNULL)
            speed = float(json.loads(Path(file.name).read_text())["output_tokens_per_s"])
        cpu_s = {name: seconds - cpu_before_s[name] for name, seconds in self.cpu_s().items() if name[-1].isdigit()}
        return LoadResult(speed, self.steps().since(before), cpu_s)

    def steps(self) -> Steps:
        """The engine's steps so far; none without metrics."""
        if not self.metrics_port:
            return Steps(Counter())
        return Steps(Counter({float(bound): int(float(num)) for bound, num in BUCKET.findall(self._metrics(0))}))

    def cpu_s(self) -> dict[str, float]:
        """Processor time of its processes so far, by their name."""
        found: dict[str, float] = {}
        for one in self.processes:
            name = one.cmdline()[0].strip().removeprefix("sluice: ")
            found[name] = found.get(name, 0.0) + sum(one.cpu_times()[:2])
        return found

    def fetch(self, stop: threading.Event) -> None:
        """Fetches the metrics of all four processes every so often, and makes an operator's call, which is refused."""
        with grpc.insecure_channel(self.address) as channel:
            control = control_pb2_grpc.ControlServiceStub(channel)
            while not stop.wait(FETCH_S):
                for place in range(4):
                    self._metrics(place)
                with contextlib.suppress(grpc.RpcError):
                    control.ClearCache(control_pb2.ClearCacheRequest())

    def _metrics(self, place: int) -> str:
        url = f"http://127.0.0.1:{self.metrics_port + place}/metrics"
        return str(urllib.request.urlopen(url, timeout=30).read().decode())


@contextlib.contextmanager
def serving(model: str, metrics_port: int, *options: str) -> Iterator[Service]:
    """A service whose engine keeps step times to one percent."""
    fine = str(Path(__file__).parent / "fine_steps")
    fine = fine if metrics_port and "--log-requests" not in options else ""
    path = os.pathsep.join(filter(None, [fine, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [*SERVE, "--model", model, "--metrics-port", str(metrics_port), *options]
    made = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=made) as child:
        assert child.stdout is not None
        try:
            address = child.stdout.readline().split(" on ")[1].split(",")[0]
            yield Service(address, psutil.Process(child.pid).children(), metrics_port)
        finally:
            child.send_signal(signal.SIGTERM)


def main() -> None:
    """Measure in turn and write the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="what is served; the demo model's requests are the cheapest")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, help="of one load; 128, or 512 with --all, so that little of it is idle"
    )
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    options.requests = options.requests or (512 if options.all else 128)
    loads: dict[str, list[LoadResult]] = {}
    with collector() as (endpoint, sink), black_hole() as hole, contextlib.ExitStack() as stack:
        ways: dict[str, tuple[int, Sequence[str]]] = {
            "plain": (PORT, QUIET),
            "traced": (PORT + 10, (*QUIET, "--otlp-endpoint", endpoint)),
            "black_hole": (PORT + 20, (*QUIET, "--otlp-endpoint", hole)),
        }
        if options.all:
            traces = ("--otlp-endpoint", endpoint)
            ways = {"off": (0, QUIET), "lines": (0, LINES), "traces": (0, (*QUIET, *traces))}
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            ways["all"] = (PORT, (*LINES, *traces, "--audit-log", str(Path(directory, "audit.jsonl"))))
        services = {way: stack.enter_context(serving(options.model, port, *more)) for way, (port, more) in ways.items()}
        if options.all:
            stop = threading.Event()
            stack.callback(stop.set)
            threading.Thread(target=services["all"].fetch, args=(stop,), daemon=True).start()
        for service in services.values():
            service.load(options.streams, 2 * options.streams)
        for i in range(options.rounds):
            names = list(services)
            for way in names[i % len(names) :] + names[: i % len(names)]:
                loads.setdefault(way, []).append(services[way].load(options.streams, options.requests))
            last = {way: found[-1] for way, found in loads.items()}
            print({way: (round(one.tokens_per_s), round(one.cpu_s, 2)) for way, one in last.items()}, flush=True)
    if options.all:
        print(whole_cost(loads), of_a_request(loads, options.requests), sep="\n")
        return
    command = "python -m benchmarks.telemetry" + "".join(f" --{name} {num}" for name, num in vars(options).items())
    write("telemetry", command, {**result(loads), "exports_received": sink.num})


def whole_cost(loads: dict[str, list[LoadResult]]) -> dict[str, object]:
    """Ratios to the service without telemetry, of processor time with its quartiles."""
    found: dict[str, object] = {}
    for way in loads.keys() - {"off"}:
        pairs = list(zip(loads[way], loads["off"], strict=True))
        cpu = sorted(one.cpu_s / base.cpu_s for one, base in pairs)
        found[f"{way}_cpu_ratio"] = round(median(cpu), 4)
        found[f"{way}_cpu_ratio_quartiles"] = [round(cpu[len(cpu) * at // 4], 4) for at in (1, 3)]
        speeds = [one.tokens_per_s / base.tokens_per_s for one, base in pairs]
        found[f"{way}_throughput_ratio"] = round(median(speeds), 4)
    return found


def of_a_request(loads: dict[str, list[LoadResult]], num: int) -> dict[str, dict[str, int]]:
    """Microseconds of each process for one of `num` requests. An engine's vary more than by what telemetry costs, as
    its threads wait for one another: the other processes, and their sum, tell more on a busy machine."""
    found: dict[str, dict[str, int]] = {}
    for way, ones in loads.items():
        of = {name: [1e6 * one.cpu_s_of[name] / num for one in ones] for name in ones[0].cpu_s_of}
        found[way] = {name: round(median(values)) for name, values in of.items()}
    return found


def result(loads: dict[str, list[LoadResult]]) -> dict[str, object]:
    """Ratios to the service without telemetry."""
    plain = loads["plain"]
    found: dict[str, object] = {"plain_tokens_per_s": round(median([one.tokens_per_s for one in plain]), 1)}
    for way in ("traced", "black_hole"):
        pairs = list(zip(loads[way], plain, strict=True))
        found[f"{way}_throughput_ratio"] = round(
            median([one.tokens_per_s / base.tokens_per_s for one, base in pairs]), 4
        )
        found[f"{way}_cpu_ratio"] = round(median([one.cpu_s / base.cpu_s for one, base in pairs]), 4)
        for name, share in PERCENTILES.items():
            ratios = [one.steps.percentile_ms(share) / base.steps.percentile_ms(share) for one, base in pairs]
            found[f"{way}_step_{name}_ratio"] = round(median(ratios), 4)
    pooled = {way: functools.reduce(Steps.__add__, [one.steps for one in ones]) for way, ones in loads.items()}
    for name, share in PERCENTILES.items():
        found[f"step_{name}_ms"] = {way: round(steps.percentile_ms(share), 2) for way, steps in pooled.items()}
    found["num_steps"] = {way: steps.at_most[math.inf] for way, steps in pooled.items()}
    return found


if __name__ == "__main__":
    main()
