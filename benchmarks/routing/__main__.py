"""Replays a trace in simulated time: cached tokens and time to the first token by way of routing.

    python -m benchmarks.routing conversation_trace.jsonl --engines 8 --speed 1.5
    python -m benchmarks.routing azure_2023_code.csv --engines 8 --speed 12

Each engine computes prompts one after the other at `--tokens-per-s` and keeps `--cache-tokens`; outputs cost nothing.
The router is the class that the service runs. Lines of a trace in Mooncake's format: {"timestamp": ms, "input_length":
tokens, "hash_ids": [block, …]}, blocks of 512 tokens. Traces of Azure (`.csv`) do not say what prompts have in common:
there the router can only tell how much engines have to do.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.fleet.loads import azure
from benchmarks.routing.policies import ById, Fleet, KvCost, LeastLoaded, Oracle, RoundRobin, RoutingPolicy
from benchmarks.routing.replicas import Arrival, Replica

BLOCK = 512

Result = dict[str, float]


def read(path: Path, speed: float) -> list[Arrival]:
    """Returns the requests of a trace, `speed` times as fast."""
    if path.suffix == ".csv":
        jobs = azure(path, None, sys.maxsize, speed).jobs
        return [Arrival(job.at_s, sum(num for _, num in job.parts), ()) for job in jobs]
    found = []
    for line in path.read_text().splitlines():
        one = json.loads(line)
        names = tuple(number.to_bytes(32, "big") for number in one["hash_ids"][: one["input_length"] // BLOCK])
        found.append(Arrival(one["timestamp"] / 1000 / speed, one["input_length"], names))
    return found


def play(arrivals: Iterable[Arrival], fleet: Fleet, policy: RoutingPolicy) -> Result:
    """Returns the share of cached tokens, seconds to the first token, and the cost of a decision."""
    ttfts, cached, asked, took_s = [], 0, 0, 0.0
    for number, arrival in enumerate(arrivals):
        start = time.perf_counter()
        engine = policy.choose(arrival, number)
        took_s += time.perf_counter() - start
        done = fleet.replicas[engine].serve(arrival)
        policy.served(engine, done)
        ttfts.append(done.ttft_s)
        cached += done.num_cached
        asked += arrival.num_tokens
    ttfts.sort()
    return {
        "cached": cached / asked,
        "mean_s": statistics.fmean(ttfts),
        "p50_s": ttfts[len(ttfts) // 2],
        "p99_s": ttfts[int(len(ttfts) * 0.99)],
        "decision_us": took_s / len(ttfts) * 1e6,
    }


WAYS: dict[str, Callable[[Fleet], RoutingPolicy]] = {
    "request-id hash": ById,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "kv-cost, lag 0.25 s": lambda fleet: KvCost(fleet, 0.25),
    "kv-cost, lag 5 s": lambda fleet: KvCost(fleet, 5.0),
    "oracle": Oracle,
}


def compare(arrivals: list[Arrival], num: int, cache_tokens: int, tokens_per_s: float) -> dict[str, Result]:
    """Returns the result of every way, each with fresh engines."""
    results = {}
    for name, way in WAYS.items():
        replicas = [Replica(cache_tokens // BLOCK, BLOCK, tokens_per_s) for _ in range(num)]
        fleet = Fleet(replicas, BLOCK, tokens_per_s)
        results[name] = play(arrivals, fleet, way(fleet))
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.5, help="how much faster than recorded")
    parser.add_argument("--cache-tokens", type=int, default=3_000_000, help="of one engine")
    parser.add_argument("--tokens-per-s", type=float, default=10_000.0, help="prompt tokens that one engine computes")
    parser.add_argument("--requests", type=int, default=0, help="only the first ones; 0 is all")
    options = parser.parse_args()
    arrivals = read(options.trace, options.speed)[: options.requests or None]
    results = compare(arrivals, options.engines, options.cache_tokens, options.tokens_per_s)
    print(f"{len(arrivals)} requests, {options.engines} engines")
    print(f"{'way':22} {'cached':>8} {'mean s':>8} {'p50 s':>8} {'p99 s':>8} {'µs each':>8}")
    for name, one in results.items():
        figures = f"{one['mean_s']:8.3f} {one['p50_s']:8.3f} {one['p99_s']:8.2f} {one['decision_us']:8.1f}"
        print(f"{name:22} {one['cached']:8.1%} {figures}")
    ours, oracle = results["kv-cost, lag 0.25 s"], results["oracle"]
    for name, limit in (("request-id hash", 0.35), ("least-loaded", 0.75)):
        print(f"mean to {name}: {ours['mean_s'] / results[name]['mean_s']:.2f} × (goal {limit})")
    if oracle["cached"]:
        print(f"cached tokens to the oracle's: {ours['cached'] / oracle['cached']:.3f} × (goal 0.98)")
    print(f"mean with a lag of 5 s: {results['kv-cost, lag 5 s']['mean_s'] / ours['mean_s']:.2f} × (goal 1.1)")


if __name__ == "__main__":
    main()
