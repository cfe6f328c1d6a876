"""The engine on one GPU: decode steps against the time their bytes take, host time a step, how busy the GPU is, and
throughput beside transformers' continuous batching.

    python -m benchmarks.gpu_engine [--parts 8b,8b-fp8,0.6b,busy,throughput] [--fresh]

Random weights made on the device. Throughput: 256 requests of 100 to 1024 tokens in and out, Qwen3-0.6B's shape. A run
that was stopped goes on where it was.
"""

import argparse
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined] # documented, but not in its __all__

from benchmarks.gpu_clock import Peaks, about_gpu, copy_bandwidth, peaks_of
from benchmarks.gpu_peer import continuous_batching, make_model
from benchmarks.gpu_results import Results, Row
from benchmarks.gpu_rig import BLOCK, LLAMA_8B, PLAIN, QWEN_06B, Kept, Rig, add, make_rig, prompts_of
from benchmarks.machine import median
from engine.models.config import ModelConfig

STEPS = 200
PARTS = ("8b", "8b-fp8", "0.6b", "busy", "throughput")


class Limits(NamedTuple):
    """What a GPU is specified with, and bytes a second that a copy reaches."""

    peaks: Peaks
    copied: float


def steady(config: ModelConfig, num: int, context: int, device: torch.device, kept: Kept = PLAIN) -> Rig:
    """`num` rows of `context` tokens each, all of which decode."""
    rig = make_rig(config, num, num * (context + STEPS + BLOCK) // BLOCK + num, device, kept)
    add(rig.engine, [(context, STEPS + 8)] * num)
    while len(rig.engine.step().sampled) < num:  # until all prompts are computed
        continue
    return rig


def decode_step(
    config: ModelConfig, num: int, context: int, device: torch.device, limits: Limits, kept: Kept = PLAIN
) -> Row:
    """Median step, how long its bytes take, and what of it the host does other than wait."""
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
    """That a decode step in bfloat16, or in 8 bits what is so, reads: weights but the embedding, which is gathered; the
    rows' keys and values."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * config.intermediate_size
    weights = layer * config.num_layers + config.vocab_size * hidden
    keys = num * context * 2 * config.num_layers * kv
    return (1 if kept.weights else 2) * weights + (2 if kept.cache is None else 1) * keys


def busy(config: ModelConfig, num: int, context: int, device: torch.device) -> Row:
    """Share of the time in which a kernel or a copy runs, of steady decode; whoever traces that slows the host."""
    rig = steady(config, num, context, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        for _ in range(STEPS // 4):
            rig.engine.step()
        torch.cuda.synchronize()
    ran = [one.time_range for one in traced.events() if one.device_type is DeviceType.CUDA]
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


def throughput(config: ModelConfig, num: int, lengths: tuple[int, int], device: torch.device) -> Row:
    """`num` requests at once, ours first, then transformers'."""
    rng = random.Random(1)
    sizes = [(rng.randint(*lengths), rng.randint(*lengths)) for _ in range(num)]
    ours = own_throughput(config, sizes, device)
    free(device)
    model = make_model(config, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    theirs = continuous_batching(model, prompts_of([size for size, _ in sizes]), [size for _, size in sizes])
    rates = [float(str(one["tokens_per_s"])) for one in (ours, theirs)]
    return {
        **ours,
        "transformers_seconds": theirs["seconds"],
        "transformers_tokens_per_s": rates[1],
        "over_transformers": rates[0] / rates[1],
    }


def own_throughput(config: ModelConfig, sizes: list[tuple[int, int]], device: torch.device) -> Row:
    """Ours. Raises RuntimeError where a request is cut short."""
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
    """Give back the memory of what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def todo(parts: Sequence[str], device: torch.device) -> list[tuple[str, Callable[[], Row]]]:
    """What these parts measure, each from free memory."""
    copied = copy_bandwidth()
    limits = Limits(peaks_of(torch.cuda.get_device_name(), copied), copied)
    step = functools.partial(decode_step, device=device, limits=limits)
    fp8 = functools.partial(step, kept=Kept("fp8", torch.float8_e4m3fn))
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    found: dict[str, Callable[[], Row]] = {
        **{f"8b: {num} rows": functools.partial(step, LLAMA_8B, num, 1024) for num in (1, 32)},
        **{f"8b-fp8: {num} rows": functools.partial(fp8, LLAMA_8B, num, 1024) for num in (1, 32) if has_fp8},
        **{f"0.6b: {num} rows": functools.partial(step, QWEN_06B, num, 512) for num in (1, 256)},
        "busy: 256 rows": functools.partial(busy, QWEN_06B, 256, 512, device),
        "throughput: 256 requests": functools.partial(throughput, QWEN_06B, 256, (100, 1024), device),
    }
    return [(key, functools.partial(freed, call, device)) for key, call in found.items() if key.split(":")[0] in parts]


def freed(call: Callable[[], Row], device: torch.device) -> Row:
    """What it measures, nothing of what was measured before being held."""
    free(device)
    return call()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: the engine is measured on one")
    results = Results("gpu_engine", "python -m benchmarks.gpu_engine", about_gpu(), is_fresh=options.fresh)
    results.measure(todo(parts, torch.device("cuda", torch.cuda.current_device())))
    for key, text in results.errors.items():
        print(f"failed: {key}: {text}", file=sys.stderr)
    return min(len(results.errors), 1)


if __name__ == "__main__":
    sys.exit(main())
