"""Replays a trace in Mooncake's format twice: by the mock engines and the router of Dynamo, and by our classes.

    make bench-dynamo TRACE=conversation_trace.jsonl

Both have the same number of engines, cache, token budget and seconds of a step (`benchmarks.fleet.polynomial`), and no
time between client and engine. Dynamo (`ai-dynamo-runtime`, no dependency of ours) runs in an environment of its own.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.fleet.cell import CellKind
from benchmarks.fleet.engine import EngineKind
from benchmarks.fleet.loads import TRACE_BLOCK, Load, mooncake
from benchmarks.fleet.plan import figures_of
from benchmarks.fleet.polynomial import PolynomialCost
from benchmarks.fleet.simulation import Simulation
from benchmarks.machine import save

GOOD_TTFT_MS, GOOD_TPOT_MS = 500.0, 50.0  # of a request that counts for goodput
BUDGET, SEQUENCES = 2048, 256

REPLAY = """
import json, os, sys
os.environ["DYN_LOG"] = "error"
from dynamo._core import run_mocker_trace_replay
asked = json.loads(sys.stdin.read())
found = {}
for mode in ("round_robin", "kv_router"):
    told = run_mocker_trace_replay(router_mode=mode, **asked).summary
    found[mode] = {name: value for name, value in told.items() if isinstance(value, (int, float))}
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What both simulate."""

    num_engines: int
    num_blocks: int
    speed: float


def dynamo(python: str, trace: Path, num: int, setting: Setting) -> dict[str, dict[str, float]]:
    """Returns Dynamo's figures by its way to route."""
    engine = {
        "backend": "vllm",
        "block_size": TRACE_BLOCK,
        "num_gpu_blocks": setting.num_blocks,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 1 << 18,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, trace.open() as lines:
        file.writelines(line for line, _ in zip(lines, range(num), strict=False))
        file.flush()
        asked = {
            "trace_files": [file.name],
            "extra_engine_args": {"engine": engine},
            "num_workers": setting.num_engines,
            "trace_block_size": TRACE_BLOCK,
            "arrival_speedup_ratio": setting.speed,
            "sla_ttft_ms": GOOD_TTFT_MS,
            "sla_itl_ms": GOOD_TPOT_MS,
        }
        done = subprocess.run(
            [python, "-c", REPLAY], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
    told: Mapping[str, Mapping[str, float]] = json.loads(done.stdout)
    return {
        f"Dynamo, {mode}": {
            "ttft_mean": one["mean_ttft_ms"],
            "ttft_p50": one["median_ttft_ms"],
            "ttft_p99": one["p99_ttft_ms"],
            "tpot_p95": one["p95_tpot_ms"],
            "cached": one["prefix_cache_reused_ratio"],
            "good": one["goodput_completed_requests"] / one["num_requests"],
        }
        for mode, one in told.items()
    }


def ours(load: Load, routing: str, setting: Setting) -> dict[str, float]:
    """Returns the figures of our classes."""
    cost = PolynomialCost(setting.num_blocks * TRACE_BLOCK)
    engine = EngineKind(cost, max_num_seqs=SEQUENCES, max_num_batched_tokens=BUDGET)
    kind = CellKind(engine, num_engines=setting.num_engines, routing=routing, max_open_requests=1 << 20)
    following = Simulation(kind, 1, load, hop_s=0.0).play()
    good = sum(one.ttft_s * 1e3 <= GOOD_TTFT_MS and one.tpot_s * 1e3 <= GOOD_TPOT_MS for one in following)
    return figures_of(following) | {"good": good / len(following)}


def main() -> None:
    """Prints a table, and writes it into benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--dynamo-python", required=True, help="an interpreter with ai-dynamo-runtime")
    parser.add_argument("--requests", type=int, default=4000, help="the first ones of the trace")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=1906, help="of 512 tokens, of an engine's cache")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than recorded")
    options = parser.parse_args()
    setting = Setting(options.engines, options.blocks, options.speed)
    found = dynamo(options.dynamo_python, options.trace, options.requests, setting)
    for routing in ("round-robin", "least-loaded", "kv-cost"):
        load = mooncake(options.trace, None, options.requests, options.speed)
        found[f"sluice, {routing}"] = ours(load, routing, setting)
    print(f"{'way':22} {'cached':>8} {'mean ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'TPOT p95':>8} {'good':>7}")
    for name, one in found.items():
        numbers = f"{one['ttft_mean']:8.0f} {one['ttft_p50']:8.0f} {one['ttft_p99']:8.0f} {one['tpot_p95']:8.1f}"
        print(f"{name:22} {one['cached']:8.1%} {numbers} {one['good']:7.1%}")
    command = f"make bench-dynamo, {options.requests} requests, speed {options.speed}"
    save("fleet_dynamo", command, {"engines": options.engines, "by_way": found})


if __name__ == "__main__":
    main()
