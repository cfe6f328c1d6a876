"""Measures what the HTTP edge adds to gRPC, with real processes in which a step takes a fixed time.

    python -m benchmarks.edge [--streams 32] [--step 0.025] [--seconds 10] [--health 4000]

The load generator shares the machine with the service. What the edge adds to a token is the time of a token by HTTP
less that by gRPC, and likewise the CPU time of all processes of the service: streams over HTTP cost the edge, and its
gateway less than calls of their own; the edge's own CPU time is told, too. Time to first token is that of single
requests, by gRPC and HTTP in turn, beside the streams. What asks for health runs at a lower priority, so that it takes
no processor from the service. The gaps beside requests for health are those of streams over gRPC.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop

from benchmarks import gateway_client as client
from benchmarks.gateway import p99_gap
from benchmarks.gateway_rig import GatewayRig, service
from benchmarks.machine import end_as_asked, median, write
from sluice_server.services.process.free_address import free_address

EDGE = "edge-0"
RUNS = 3
PROBES = 40  # of each kind
TICK_S = 0.005
NICE = 10  # of the load of health requests
CONNECTIONS = 8  # of the load of health requests
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Body:
    """A request of one stream over HTTP: a random prompt, that many tokens out."""

    def __init__(self, num_tokens: int, rng: random.Random) -> None:
        prompt = [rng.randrange(300, 1300) for _ in range(8)]
        asked = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        self.sent = head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def read(port: int, num_tokens: int, rng: random.Random) -> client.SeenStream:
    """Reads one stream to its end."""
    seen = client.SeenStream(time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(Body(num_tokens, rng).sent)
    while line := await reader.readline():
        if b'"text":' in line and b'"finish_reason":null' in line:
            seen.arrivals_s.append(time.monotonic())
    writer.close()
    seen.num_tokens = num_tokens
    seen.end_s = time.monotonic()
    return seen


async def read_many(port: int, num: int, num_tokens: int, seed: int = 0) -> list[client.SeenStream]:
    """Reads that many streams at once."""
    rng = random.Random(seed)
    return list(await asyncio.gather(*[read(port, num_tokens, rng) for _ in range(num)]))


async def first_tokens(address: str, port: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token by gRPC and by HTTP, one request after the other."""
    found: tuple[list[float], list[float]] = [], []
    rng = random.Random(1)
    async with client.connected(address) as stubs:
        for at in range(PROBES):
            for kind in (0, 1):
                seen = await (client.read(stubs[at % len(stubs)], 2, rng) if kind == 0 else read(port, 2, rng))
                found[kind].append(seen.arrivals_s[0] - seen.start_s)
    return found


async def ask_for_health(port: int, rate: int, seconds: float) -> int:
    """Sends that many requests a second on a few connections. Returns the number of answers."""
    answers = 0

    async def one() -> None:
        nonlocal answers
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def count() -> None:
            nonlocal answers
            while part := await reader.read(1 << 16):
                answers += part.count(b"HTTP/1.1 200")

        counting = asyncio.create_task(count())
        start_s, sent = time.monotonic(), 0
        while (now_s := time.monotonic() - start_s) < seconds:
            due = int(now_s * rate / CONNECTIONS) - sent
            writer.write(HEALTH * due)
            sent += due
            await asyncio.sleep(TICK_S)
        writer.close()
        await counting

    await asyncio.gather(*[one() for _ in range(CONNECTIONS)])
    return answers


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Runs everything in turn, the median of some runs each."""
    listen = free_address("127.0.0.1:0")
    port = int(listen.rpartition(":")[2])
    num_tokens, streams = int(options.seconds / options.step), options.streams
    parts, added, alone, beside, rates = [], [], [], [], []
    by_process: dict[str, list[dict[str, float]]] = {"http": [], "grpc": []}
    by_grpc: list[float] = []
    by_http: list[float] = []
    with service(options.step, max_open_requests=4 * streams, http=listen) as rig:
        while subprocess.run(["curl", "-sf", f"http://{listen}/health/ready"], capture_output=True).returncode:
            continue
        await read_many(port, streams, 10)
        async with client.connected(rig.address) as stubs:
            for run in range(RUNS):
                with measured(rig, streams * num_tokens) as costs:
                    seen = await read_many(port, streams, num_tokens, run)
                by_process["http"].append(costs)
                parts.append(streams * num_tokens / sum(len(one.arrivals_s) for one in seen))
                background = asyncio.create_task(read_many(port, streams, 10**5, run))
                await asyncio.sleep(1.0)
                grpc_s, http_s = await first_tokens(rig.address, port)
                by_grpc += grpc_s
                by_http += http_s
                background.cancel()
                await asyncio.gather(background, return_exceptions=True)
                await client.until_idle(rig.address)
                with measured(rig, streams * num_tokens) as costs:
                    bare = await client.read_many(stubs, streams, num_tokens, run)
                by_process["grpc"].append(costs)
                added.append((time_of_token(seen) - time_of_token(bare)) * 1e6)
                alone.append(p99_gap(bare))
                command = [sys.executable, "-m", "benchmarks.edge", "--load", str(port)]
                command += ["--health", str(options.health), "--seconds", str(options.seconds)]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
                    beside.append(p99_gap(await client.read_many(stubs, streams, num_tokens, run)))
                    assert load.stdout is not None
                    rates.append(float(await asyncio.to_thread(load.stdout.readline)))
    return {
        "streams": streams,
        "step_ms": options.step * 1e3,
        "us_added_to_a_token": round(median(added), 1),
        "edge_cpu_us_per_token": round(median([one[EDGE] for one in by_process["http"]]), 1),
        "service_cpu_us_per_token": {
            door: {name: round(median([one[name] for one in runs]), 1) for name in runs[0]}
            for door, runs in by_process.items()
        },
        "service_cpu_us_added_to_a_token": [
            round(sum(http.values()) - sum(grpc.values()), 1) for http, grpc in zip(*by_process.values(), strict=True)
        ],
        "tokens_per_event": round(median(parts), 2),
        "ttft_ms_grpc": round(median(by_grpc) * 1e3, 2),
        "ttft_ms_http": round(median(by_http) * 1e3, 2),
        "ttft_ms_added": round((median(by_http) - median(by_grpc)) * 1e3, 2),
        "health_answers_a_second": [round(rate) for rate in rates],
        "p99_gap_ms_alone": alone,
        "p99_gap_ms_beside_health": beside,
        "p99_gap_moved_percent": moved(alone, beside),
    }


@contextlib.contextmanager
def measured(rig: GatewayRig, num_tokens: int) -> Iterator[dict[str, float]]:
    """Yields a table that after the block has the microseconds of CPU time that a token has cost each process."""
    costs: dict[str, float] = {}
    before = {name: rig.cpu_s(name) for name in rig.processes}
    yield costs
    costs.update({name: (rig.cpu_s(name) - before[name]) / num_tokens * 1e6 for name in before})


def time_of_token(seen: Sequence[client.SeenStream]) -> float:
    """Seconds from one token of a stream to its next, the mean of all streams."""
    return sum((one.arrivals_s[-1] - one.arrivals_s[0]) / one.num_tokens for one in seen) / len(seen)


def moved(alone: Sequence[float], beside: Sequence[float]) -> float:
    """By how many percent the median grows."""
    return round(100 * (median(beside) / median(alone) - 1), 1)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="streams at once")
    parser.add_argument("--step", type=float, default=0.025, help="seconds of an engine step: one token of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each part")
    parser.add_argument("--health", type=int, default=4000, help="requests a second for /health beside the streams")
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)  # the port; what the load is started with
    options = parser.parse_args()
    end_as_asked()
    if options.load:
        os.nice(NICE)
        print(uvloop.run(ask_for_health(options.load, options.health, options.seconds)) / options.seconds)
        return
    figures = uvloop.run(measure(options))
    chosen = f"--streams {options.streams} --step {options.step} --seconds {options.seconds} --health {options.health}"
    write("edge", f"python -m benchmarks.edge {chosen}", figures)


if __name__ == "__main__":
    main()
