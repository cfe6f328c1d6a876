"""Measures the gateway with real processes, in which the runner is replaced by one that takes a fixed time a step.

    python -m benchmarks.gateway [--only NAME …]

The load generator shares the machine with the service, and is often what limits it: CPU per message says more than
messages a second. Latencies on a shared machine: the median of three runs.
"""

import argparse
import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop
from sluice.v1 import inference_pb2

from benchmarks import gateway_client as client
from benchmarks.gateway_memory import GATEWAY, Growth, rounds_of_cancels
from benchmarks.gateway_rig import GatewayRig, bare_server, service
from benchmarks.machine import end_as_asked, median, write

Figures = dict[str, object]
MIB = 1 << 20
RUNS = 3
FEW = 4  # at once, beside the many that make the processors wait for each other
LEAKS = (1024, 32)  # bytes kept of a request by gateways that leak: one of malloc, one of Python's own allocator


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile by nearest rank, in milliseconds."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


async def paced() -> Figures:
    """256 streams of 20 tokens per second: gaps between messages, and the gateway's CPU for a message of one token."""
    p99s, costs, bare, errors = [], [], [], 0
    with service(0.05, max_open_requests=512) as rig:
        async with client.connected(rig.address) as stubs:
            await client.read_many(stubs, 256, 20)
            for run in range(RUNS):
                bare.append(await bare_cost(256, 0.05, 100))
                before = rig.cpu_s(GATEWAY)
                seen = await client.read_many(stubs, 256, 200, seed=run)
                costs.append((rig.cpu_s(GATEWAY) - before) / sum(len(one.arrivals_s) for one in seen) * 1e6)
                p99s.append(percentile([gap for one in seen for gap in one.gaps_s], 0.99))
                errors += sum(bool(one.error) for one in seen)
    return {
        "streams": 256,
        "tokens_per_s_each": 20,
        "p99_gap_ms": median(p99s),
        "p99_gap_ms_runs": p99s,
        "gateway_us_per_message": round(median(costs), 1),
        "bare_grpc_us_per_message": round(median(bare), 1),
        "gateway_of_bare_grpc": round(median([ours / theirs for ours, theirs in zip(costs, bare, strict=True)]), 2),
        "errors": errors,
    }


async def bare_cost(num: int, interval_s: float, num_messages: int) -> float:
    """Microseconds of CPU per message in a gRPC server that only writes, at the same rate."""
    with bare_server(num, interval_s) as rig:
        before = rig.cpu_s("bare")
        await client.read_bare(rig.address, num, num_messages)
        return (rig.cpu_s("bare") - before) / (num * num_messages) * 1e6


async def idle() -> Figures:
    """1,000 Converse streams, each with a generation that waits for credit: the gateway's memory."""
    with service(0.001, max_open_requests=1100, max_num_seqs=1100) as rig:
        before = rig.rss(GATEWAY)
        rng = random.Random(0)
        async with client.connected(rig.address) as stubs:

            async def hold(stub: client.Stub) -> None:
                call = stub.Converse()
                spec = client.spec(100, rng)
                spec.credit_window = 0
                await call.write(inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=spec)))
                for kind in ("accepted", "throttled"):
                    frame = await call.read()
                    assert isinstance(frame, inference_pb2.ConverseResponse) and frame.WhichOneof("frame") == kind
                calls.append(call)

            calls: list[object] = []
            for at in range(0, 1000, 50):
                await asyncio.gather(*[hold(stubs[i % len(stubs)]) for i in range(at, at + 50)])
            await asyncio.sleep(3.0)
            with_streams = rig.rss(GATEWAY)
        await client.until_idle(rig.address)
    return {"streams": 1000, "gateway_mib": round(with_streams / MIB, 1), "gateway_mib_before": round(before / MIB, 1)}


async def coalesced() -> Figures:
    """64 streams as fast as the ring delivers, steps of 1 ms: the gateway's CPU per token."""
    costs, rates, sizes = [], [], []
    with service(0.001, max_open_requests=128) as rig:
        async with client.connected(rig.address) as stubs:
            await client.read_many(stubs, 64, 100)
            for run in range(RUNS):
                before, start_s = rig.cpu_s(GATEWAY), time.monotonic()
                seen = await client.read_many(stubs, 64, 1500, seed=run)
                tokens = sum(one.num_tokens for one in seen)
                costs.append((rig.cpu_s(GATEWAY) - before) / tokens * 1e6)
                rates.append(tokens / (time.monotonic() - start_s))
                sizes.append(tokens / sum(len(one.arrivals_s) for one in seen))
    return {
        "streams": 64,
        "gateway_us_per_token": round(median(costs), 2),
        "tokens_per_s": round(median(rates)),
        "tokens_per_message": round(median(sizes), 1),
    }


async def cancels() -> Figures:
    """12,000 random cancels: time from the client's cancel to the free slot, and a check that finds leaks."""
    with service(0.001, watched=True, max_open_requests=128) as rig:
        cancelled, growth = await rounds_of_cancels(rig, 7, 1000)
        last = await client.until_idle(rig.address)
        lost = [one.total_blocks - one.free_blocks for one in last.engines]
    took = times_to_free_slots(rig, cancelled)
    with service(0.001, max_open_requests=128) as rig:
        async with client.connected(rig.address) as stubs:
            few = await client.cancel_many(stubs, 2000, FEW, 0)
    took_few = times_to_free_slots(rig, few)
    controls = {}
    for num_bytes in LEAKS:
        with service(0.001, watched=True, leak_bytes=num_bytes, max_open_requests=128) as rig:
            controls[num_bytes] = (await rounds_of_cancels(rig, 4, 1000))[1]
    return {
        "cancels": 12_000,
        "timed": len(took),
        "to_free_slot_p50_ms": percentile(took, 0.5),
        "to_free_slot_p99_ms": percentile(took, 0.99),
        f"to_free_slot_p50_ms_{FEW}_at_once": percentile(took_few, 0.5),
        f"to_free_slot_p99_ms_{FEW}_at_once": percentile(took_few, 0.99),
        "blocks_lost": lost,
        "growth_a_request": rounded(growth),
        "is_leak": growth.is_leak,
        "leaky_controls": {
            f"{num} bytes kept": {**rounded(one), "is_leak": one.is_leak} for num, one in controls.items()
        },
    }


def times_to_free_slots(rig: GatewayRig, cancelled: Sequence[tuple[str, float]]) -> list[float]:
    """Seconds from the client's cancel until the engine freed the slot, from the log of the ended engine."""
    ended_s: dict[str, float] = rig.engine_log["cancelled"]
    return [ended_s[name] - at_s for name, at_s in cancelled if name in ended_s]


def rounded(growth: Growth) -> Figures:
    """The value rounded for the result."""
    return {name: round(value, 2) for name, value in dataclasses.asdict(growth).items()}


async def credit() -> Figures:
    """A reader with a credit of 64 that grants no more: what it receives, and what the engine computes."""
    with service(0.001) as rig:
        async with client.connected(rig.address) as stubs:
            call = stubs[0].Converse()
            spec = client.spec(1000, random.Random(0))
            spec.credit_window = 64
            await call.write(inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=spec)))
            received, name = 0, ""
            while True:
                frame = await call.read()
                assert isinstance(frame, inference_pb2.ConverseResponse)
                received += frame.delta.consumed
                name = frame.accepted.generation_id.partition(".")[0] or name
                if frame.HasField("throttled"):
                    break
            await asyncio.sleep(1.0)  # what the engine would compute ahead, it has by now
            call.cancel()
    return {"credit": 64, "received": received, "computed": rig.engine_log["sampled"][name]}


async def stalled() -> Figures:
    """64 streams of which one stops reading: the cost for the others."""
    alone, beside = [], []
    with service(0.02, max_open_requests=128) as rig:
        async with client.connected(rig.address) as stubs, client.connected(rig.address) as others:
            await client.read_many(stubs, 64, 20)
            for run in range(RUNS):
                alone.append(p99_gap(await client.read_many(stubs, 63, 250, seed=run)))
                call = client.start(others[0], 4000, random.Random(run))
                beside.append(p99_gap(await client.read_many(stubs, 63, 250, seed=run)))
                call.cancel()
    cost = median(beside) / median(alone) - 1.0
    return {"p99_gap_ms_alone": alone, "p99_gap_ms_beside": beside, "cost_percent": round(100 * cost, 1)}


def p99_gap(seen: Sequence[client.SeenStream]) -> float:
    """The 99th percentile of gaps over all streams."""
    return percentile([gap for one in seen for gap in one.gaps_s], 0.99)


async def overload() -> Figures:
    """Ten times the service's capacity: how soon the rest is refused, and the remaining throughput."""
    num_tokens, seconds = 32, 10.0
    with service(0.02, max_num_seqs=16, max_open_requests=24) as rig:
        async with client.connected(rig.address) as stubs:
            await client.read_many(stubs, 16, num_tokens)
            peak = await closed_loop(stubs, 24, num_tokens, seconds)
            rng, start_s = random.Random(0), time.monotonic()
            tasks: list[asyncio.Task[client.SeenStream]] = []
            rate = 10 * peak / num_tokens
            while time.monotonic() - start_s < seconds:
                tasks.append(asyncio.create_task(client.read(stubs[len(tasks) % len(stubs)], num_tokens, rng)))
                await asyncio.sleep(max(0.0, start_s + len(tasks) / rate - time.monotonic()))
            seen = await asyncio.gather(*tasks)
    refused = [one for one in seen if one.error]
    done = sum(one.num_tokens for one in seen if not one.error)
    took = max(one.end_s for one in seen) - start_s
    return {
        "peak_tokens_per_s": round(peak),
        "offered_requests_per_s": round(len(seen) / seconds, 1),
        "refused": len(refused),
        "refusal_codes": sorted({one.error for one in refused}),
        "refusal_p99_ms": percentile([one.end_s - one.start_s for one in refused], 0.99),
        "goodput_of_peak": round(done / took / peak, 3),
    }


async def closed_loop(stubs: Sequence[client.Stub], at_once: int, num_tokens: int, seconds: float) -> float:
    """Tokens per second when each of `at_once` clients sends its next request at once."""
    end_s, rng, done = time.monotonic() + seconds, random.Random(1), 0

    async def work(stub: client.Stub) -> None:
        nonlocal done
        while time.monotonic() < end_s:
            seen = await client.read(stub, num_tokens, rng)  # before the sum: others add to it meanwhile
            done += seen.num_tokens

    start_s = time.monotonic()
    await asyncio.gather(*[work(stubs[at % len(stubs)]) for at in range(at_once)])
    return done / (time.monotonic() - start_s)


FIGURES: dict[str, Callable[[], Coroutine[Any, Any, Figures]]] = {
    figure.__name__: figure for figure in (paced, idle, coalesced, cancels, credit, stalled, overload)
}


def main() -> None:
    """Measure, and write benchmarks/results/gateway.json when all was measured."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=FIGURES, default=list(FIGURES))
    wanted = parser.parse_args().only
    figures: Figures = {}
    for name in wanted:
        figures[name] = uvloop.run(FIGURES[name]())
        print(name, figures[name], flush=True)
    if set(wanted) == FIGURES.keys():
        write("gateway", "python -m benchmarks.gateway", figures)


if __name__ == "__main__":
    main()
