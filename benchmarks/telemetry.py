"""What telemetry costs: throughput with every request traced, and steps with a collector that takes everything and
answers nothing.

    python -m benchmarks.telemetry [--runs 5] [--streams 64] [--requests 256]

Demo model, 64 tokens in and 64 out, closed loop. Each run measures three services one after the other: without
telemetry, with traces and metrics to a collector, with the same to a black hole; ratios are within a run, as the
machine changes from one to the next. The collector answers without reading, lest its own work be charged. The
99th percentile of the time between two messages of a stream stands for that of a step, which it contains; the mean of
steps is the engine's own.
"""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from benchmarks.machine import median, write

LENGTH = 64
SERVE = (sys.executable, "-m", "services.cli.main", "serve", "--listen", "127.0.0.1:0", "--log-level", "error")
BENCH = (sys.executable, "-m", "services.cli.main", "bench", "--input-len", str(LENGTH), "--output-len", str(LENGTH))
PORT = 19464  # of the engine's metrics: the first process


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


def figures(streams: int, requests: int, *options: str) -> dict[str, float]:
    """Tokens a second, 99th percentile of gaps and mean step in milliseconds."""
    command = [*SERVE, "--metrics-port", str(PORT), *options]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service,
        tempfile.TemporaryDirectory() as scratch,
    ):
        assert service.stdout is not None
        address = service.stdout.readline().split(" on ")[1].split(",")[0]
        bench = [*BENCH, "--address", address, "--concurrency", str(streams)]
        subprocess.run([*bench, "--requests", str(streams)], check=True, stdout=subprocess.DEVNULL)
        before = steps()
        path = Path(scratch) / "bench.json"
        more = ["--requests", str(requests), "--warmup", "0", "--seed", "1", "--json", str(path)]
        subprocess.run([*bench, *more], check=True, stdout=subprocess.DEVNULL)
        after = steps()
        service.send_signal(signal.SIGTERM)
        found = json.loads(path.read_text())
    step_ms = (after[0] - before[0]) / (after[1] - before[1]) * 1e3
    return {"tokens_per_s": found["output_tokens_per_s"], "gap_p99_ms": found["itl_ms"]["p99"], "step_ms": step_ms}


def steps() -> tuple[float, float]:
    """Seconds and number of the engine's steps so far."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10).read().decode()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    return values["sluice_engine_step_time_seconds_sum"], values["sluice_engine_step_time_seconds_count"]


def ratio(runs: list[dict[str, float]], plain: list[dict[str, float]], name: str) -> float:
    """Median of a figure's ratio to that of the same run without telemetry."""
    return round(median([one[name] / other[name] for one, other in zip(runs, plain, strict=True)]), 4)


def main() -> None:
    """Measure in turn and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    options = parser.parse_args()
    load = (options.streams, options.requests)
    plain, traced, swallowed = [], [], []
    num_exports = 0
    with collector() as (endpoint, sink), black_hole() as hole:
        for _ in range(options.runs):
            plain.append(figures(*load))
            traced.append(figures(*load, "--otlp-endpoint", endpoint))
            swallowed.append(figures(*load, "--otlp-endpoint", hole))
            print(f"plain {plain[-1]}\ntraced {traced[-1]}\nblack hole {swallowed[-1]}", flush=True)
        num_exports = sink.num
    result: dict[str, object] = {
        "plain_tokens_per_s": round(median([one["tokens_per_s"] for one in plain]), 1),
        "traced_throughput_ratio": ratio(traced, plain, "tokens_per_s"),
        "black_hole_throughput_ratio": ratio(swallowed, plain, "tokens_per_s"),
        "black_hole_gap_p99_ratio": ratio(swallowed, plain, "gap_p99_ms"),
        "black_hole_step_mean_ratio": ratio(swallowed, plain, "step_ms"),
        "exports_received": num_exports,
    }
    command = f"python -m benchmarks.telemetry --runs {options.runs} --streams {load[0]} --requests {load[1]}"
    write("telemetry", command, result)


if __name__ == "__main__":
    main()
