"""Replays a trace in simulated time: cached tokens and time to the first token by way of routing.

    python -m benchmarks.routing conversation_trace.jsonl --engines 8 --speed 1.5
    python -m benchmarks.routing azure_2023_code.csv --engines 8 --speed 12

Each engine computes prompts one after the other at `--tokens-per-s` and keeps `--cache-tokens`; outputs cost nothing.
The router is the class that the service runs. Lines of a trace in Mooncake's format: {"timestamp": ms, "input_length":
tokens, "output_length": tokens, "hash_ids": [block, …]}, blocks of 512 tokens. Such a trace does not name the blocks
that answers fill: they are those of the first later prompt that goes on where a prompt of two full blocks or more
ended, and has room for its answer. Traces of Azure (`.csv`) do not say what prompts have in common: there the router
can only tell how much engines have to do.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.fleet.loads import azure
from benchmarks.routing.policies import ById, Fleet, KvCost, LeastLoaded, Oracle, RoundRobin, RoutingPolicy
from benchmarks.routing.replicas import Arrival, Replica

BLOCK = 512
TOKEN_S = 0.02  # assumed of a token of an answer: the router hears of its blocks so late

Result = dict[str, float]


def read(path: Path, speed: float, token_s: float = TOKEN_S) -> list[Arrival]:
    """Returns the requests of a trace, `speed` times as fast; `token_s`: what a token of an answer takes."""
    if path.suffix == ".csv":
        jobs = azure(path, None, sys.maxsize, speed).jobs
        return [Arrival(job.at_s, sum(num for _, num in job.parts), ()) for job in jobs]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = [
        tuple(number.to_bytes(32, "big") for number in one["hash_ids"][: one["input_length"] // BLOCK]) for one in rows
    ]
    generated = answered(rows, names)
    return [
        Arrival(one["timestamp"] / 1000 / speed, one["input_length"], own, more, one["output_length"] * token_s)
        for one, own, more in zip(rows, names, generated, strict=True)
    ]


def answered(rows: Sequence[Mapping[str, int]], names: Sequence[tuple[bytes, ...]]) -> list[tuple[bytes, ...]]:
    """Returns for each request the names of the full blocks behind its prompt's that its answer fills, as its next turn
    tells."""
    with_block: dict[tuple[int, bytes], list[int]] = {}
    for at, own in enumerate(names):
        for place, name in enumerate(own):
            with_block.setdefault((place, name), []).append(at)
    found = []
    for at, own in enumerate(names):
        num_tokens = rows[at]["input_length"] + rows[at]["output_length"]
        going_on = with_block[len(own) - 1, own[-1]] if len(own) > 1 else []
        later = (two for two in going_on if two > at and rows[two]["input_length"] >= num_tokens)
        turn = next(later, None)
        found.append(() if turn is None else names[turn][len(own) : num_tokens // BLOCK])
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
