"""The engine on one GPU: decode steps against the time their bytes take, host time a step, how busy the GPU is, the
share of mixed traffic that is recorded, and throughput beside transformers' continuous batching.

    python -m benchmarks.gpu_engine [--parts 8b,8b-fp8,0.6b,busy,mixed,throughput] [--fresh] [--seconds N] [--out DIR]
        [--dry-run]

Random weights made on the device. Throughput: 256 requests of 100 to 1024 tokens in and out, Qwen3-0.6B's shape. A run
that was stopped goes on where it was.
"""

import dataclasses
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined] # documented, but not in its __all__

from benchmarks.gpu_clock import Peaks
from benchmarks.gpu_command import Asked, asked
from benchmarks.gpu_mixed import mixed
from benchmarks.gpu_peer import continuous_batching, make_model
from benchmarks.gpu_results import Row
from benchmarks.gpu_rig import BLOCK, LLAMA_8B, PLAIN, QWEN_06B, GpuRig, Kept, add, make_rig, prompts_of
from benchmarks.machine import median
from sluice_server.engine.models.config import ModelConfig

STEPS = 200
OURS = "throughput: ours"
PARTS = ("8b", "8b-fp8", "0.6b", "busy", "mixed", "throughput")


Rows = Mapping[str, Row]


class GpuLimits(NamedTuple):
    """The GPU's specified limits, and the bytes per second that a copy reaches."""

    peaks: Peaks
    copied: float


def steady(config: ModelConfig, num: int, context: int, device: torch.device, kept: Kept = PLAIN) -> GpuRig:
    """A rig with `num` rows of `context` tokens each, all of which decode."""
    rig = make_rig(config, num, num * (context + STEPS + BLOCK) // BLOCK + num, device, kept)
    add(rig.engine, [(context, STEPS + 8)] * num)
    while len(rig.engine.step().sampled) < num:  # until all prompts are computed
        continue
    return rig


def decode_step(
    config: ModelConfig, num: int, context: int, device: torch.device, limits: GpuLimits, kept: Kept = PLAIN
) -> Row:
    """The median step, the time its bytes take, and the host's time without waiting."""
    rig = steady(config, num, context, device, kept)
    times, hosts = [], []
    for _ in range(STEPS // 2):
        begun, waited = time.perf_counter(), rig.waited_s
        rig.engine.step()
        times.append(time.perf_counter() - begun)
        hosts.append(times[-1] - (rig.waited_s - waited))
    read = step_bytes(config, num, context, kept)
    step = median(times)
    return {
        "rows": num,
        "context": context,
        "ms": step * 1e3,
        "host_ms": median(hosts) * 1e3,
        "of_specified": read / limits.peaks.bandwidth / step,
        "of_copy": read / limits.copied / step,
    }


def step_bytes(config: ModelConfig, num: int, context: int, kept: Kept = PLAIN) -> int:
    """Bytes that a decode step reads, in bfloat16 or partly in 8 bits: the weights without the embedding, which is
    gathered, and the rows' keys and values."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * config.intermediate_size
    weights = layer * config.num_layers + config.vocab_size * hidden
    keys = num * context * 2 * config.num_layers * kv
    return (1 if kept.weights else 2) * weights + (2 if kept.cache is None else 1) * keys


def busy(config: ModelConfig, num: int, context: int, device: torch.device) -> Row:
    """Returns the share of steady decode in which a kernel or a copy runs; the tracing slows the host."""
    rig = steady(config, num, context, device)
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as traced:
        for _ in range(STEPS // 4):
            rig.engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    ran = [one.time_range for one in traced.events() if one.device_type == kind]  # no identity: each is made anew
    return {"rows": num, "context": context, "busy": covered((one.start, one.end) for one in ran)}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end in which at least one span is open. Raises ValueError
    without any."""
    rising = sorted(spans)
    if not rising:
        raise ValueError("nothing ran on the device while it was traced")
    first = end = rising[0][0]
    total = 0.0
    for start, stop in rising:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / (end - first)


def sizes_of(num: int, lengths: tuple[int, int]) -> list[tuple[int, int]]:
    """Tokens in and out of each of `num` requests."""
    rng = random.Random(1)
    return [(rng.randint(*lengths), rng.randint(*lengths)) for _ in range(num)]


def peer_throughput(config: ModelConfig, sizes: list[tuple[int, int]], device: torch.device, rows: Rows) -> Row:
    """The throughput of transformers, and the ratio to ours where that was measured before."""
    model = make_model(config, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    found = continuous_batching(model, prompts_of([size for size, _ in sizes]), [size for _, size in sizes])
    if OURS in rows:
        found["ours_over_it"] = float(str(rows[OURS]["tokens_per_s"])) / float(str(found["tokens_per_s"]))
    return found


def own_throughput(config: ModelConfig, sizes: list[tuple[int, int]], device: torch.device) -> Row:
    """Our throughput. Raises RuntimeError if a request is cut short."""
    blocks = sum(-(-sum(size) // BLOCK) + 1 for size in sizes)
    engine = make_rig(config, len(sizes), blocks, device).engine
    add(engine, sizes)
    begun, num = time.perf_counter(), 0
    while engine.has_work:
        num += sum(len(event.token_ids) for event in engine.step().sampled)
    took = time.perf_counter() - begun
    if num != sum(size for _, size in sizes):
        raise RuntimeError(f"{num} tokens came of {sum(size for _, size in sizes)}")
    return {"requests": len(sizes), "seconds": took, "tokens": num, "tokens_per_s": num / took}


def free(device: torch.device) -> None:
    """Frees the memory of objects without references."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLoads:
    """Models, and what they are measured at: rows and tokens of each.

    Attributes:
        requests, lengths: of throughput: how many, and tokens in and out of each.
        mixed, mixed_lengths: of mixed traffic: rows at most, tokens of a step at most, requests; tokens of each.
    """

    large: ModelConfig = LLAMA_8B
    small: ModelConfig = QWEN_06B
    few: tuple[int, ...] = (1, 32)
    many: tuple[int, ...] = (1, 256)
    contexts: tuple[int, int] = (1024, 512)
    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)
    mixed: tuple[int, int, int] = (64, 2048, 200)
    mixed_lengths: tuple[int, int] = (100, 512)


TINY = dataclasses.replace(
    QWEN_06B,
    vocab_size=10_000,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    windows=(None,),
    context_length=300,
)
DRY = GpuLoads(TINY, TINY, (1,), (3,), (8, 5), 4, (5, 12), (3, 64, 6), (5, 12))


def todo(given: Asked) -> list[tuple[str, Callable[[], Row]]]:
    """The measurements of these parts, each from free memory."""
    ground, loads = given.ground, DRY if given.ground.is_dry else GpuLoads()
    device, (long, short) = ground.at.device, loads.contexts
    step = functools.partial(decode_step, device=device, limits=GpuLimits(ground.peaks, ground.copied))
    fp8 = functools.partial(step, kept=Kept("fp8", torch.float8_e4m3fn))
    sizes = sizes_of(loads.requests, loads.lengths)
    found: dict[str, Callable[[], Row]] = {
        **{f"8b: {num} rows": functools.partial(step, loads.large, num, long) for num in loads.few},
        **{f"0.6b: {num} rows": functools.partial(step, loads.small, num, short) for num in loads.many},
        f"busy: {loads.many[-1]} rows": functools.partial(busy, loads.small, loads.many[-1], short, device),
        f"mixed: {loads.mixed[0]} rows": functools.partial(
            mixed,
            loads.small,
            loads.mixed[0],
            sizes_of(loads.mixed[2], loads.mixed_lengths),
            loads.mixed[1],
            device,
        ),
        OURS: functools.partial(own_throughput, loads.small, sizes, device),
        "throughput: transformers": functools.partial(peer_throughput, loads.small, sizes, device, given.results.rows),
    }
    if ground.has_fp8 and device.type == "cuda":
        found |= {f"8b-fp8: {num} rows": functools.partial(fp8, loads.large, num, long) for num in loads.few}
    calls = [(key, functools.partial(freed, call, device)) for key, call in found.items()]
    return [(key, call) for key, call in calls if key.split(":")[0] in given.parts]


def freed(call: Callable[[], Row], device: torch.device) -> Row:
    """Measures after freeing what earlier measurements held."""
    free(device)
    return call()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what has no result yet; returns 1 if something failed."""
    given = asked("gpu_engine", __doc__, PARTS, arguments)
    return given.run(todo(given))


if __name__ == "__main__":
    sys.exit(main())
