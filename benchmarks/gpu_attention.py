"""Attention on one GPU against its roofline and against what else there is: torch's SDPA, FlexAttention, FlashInfer.

    python -m benchmarks.gpu_attention [--tune] [--fresh]

Median of 100 runs, the L2 cache flushed before each. Percentages of what the GPU is specified with and of the bandwidth
that a copy reaches here. `--tune` tries configurations and writes the best to `kernels/triton/tuned`. A run that was
stopped goes on where it was, the tuning too; --fresh begins again.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu_clock import Peaks, about_gpu, copy_bandwidth, peaks_of, seconds
from benchmarks.gpu_plots import draw
from benchmarks.gpu_results import Results, Row
from kernels import slots
from kernels.ragged import AttentionOptions, Ragged, Shared
from kernels.triton import configs
from kernels.triton.attention import gpu_of, paged_attention
from kernels.triton.configs import Shape, Tiles

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 32
DECODES = [(1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 4096), (32, 8192), (64, 8192), (256, 4096)]
PREFILLS = [(1, 1024), (1, 4096), (1, 16384), (4, 4096), (16, 1024)]
CASCADES = [(4, 8192), (32, 1024), (32, 8192), (128, 2048)]  # rows, tokens that all of them share
OWN = 512  # tokens of each row behind these


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, draw, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: attention is measured on one")
    if options.tune:
        tune(is_fresh=options.fresh)
    about, copied = about_gpu(), copy_bandwidth()
    results = Results("gpu_attention", "python -m benchmarks.gpu_attention", about, is_fresh=options.fresh)
    results.measure(todo(peaks_of(str(about["gpu"]), copied), copied))
    draw("gpu_attention", results.rows)
    for key, text in results.errors.items():
        print(f"failed: {key}: {text}", file=sys.stderr)
    return min(len(results.errors), 1)


def todo(peaks: Peaks, copied: float) -> list[tuple[str, Callable[[], Row]]]:
    """Every decode for each format of the cache, then prefills, and decodes of rows that share a prefix."""
    found: list[tuple[str, Callable[[], Row]]] = []
    for kept, (batch, length) in itertools.product(kept_as(), DECODES):
        key = f"decode: {name_of(kept)}, {batch} x {length}"
        found.append((key, functools.partial(decode, batch, length, kept, peaks, copied)))
    for batch, length in PREFILLS:
        found.append((f"prefill: {batch} x {length}", functools.partial(prefill, batch, length, peaks)))
    for batch, shared in CASCADES:
        found.append((f"cascade: {batch} x {shared}", functools.partial(cascade, batch, shared, peaks)))
    return found


def name_of(dtype: torch.dtype) -> str:
    """As results write it."""
    return str(dtype).removeprefix("torch.")


def kept_as() -> list[torch.dtype]:
    """Number formats of caches that this GPU has."""
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    return [torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if has_fp8 else [])]


def paged(batch: int, length: int, num: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Ragged, Tensor | None]:
    """Queries, a cache whose blocks are in random order, rows of `num` tokens, scales."""
    width = -(-length // BLOCK)
    cache, scales = cache_of(batch * width + 1, kept)
    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
    rows = Ragged.of(np.full(batch, num), np.full(batch, length), order, torch.device("cuda"))
    q = torch.randn(batch * num, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return q, cache, rows, scales


def cache_of(num_blocks: int, kept: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Random keys and values as the engine keeps them on a GPU, and in 8 bits their scales."""
    numbers = torch.randn(num_blocks, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    return slots.parts(slots.encode(numbers, kept, slots.GPU_ALIGN).permute(0, 3, 1, 2, 4), DIM)


def decode(batch: int, length: int, kept: torch.dtype, peaks: Peaks, copied: float) -> Row:
    """One token of each of `batch` rows."""
    q, cache, rows, scales = paged(batch, length, 1, kept)
    took = seconds(lambda: paged_attention(q, cache, rows, AttentionOptions(DIM**-0.5), scales))
    read = batch * length * 2 * KV_HEADS * (DIM * kept.itemsize + (4 if scales is not None else 0))
    others = peers(q, batch, length, 1) if kept is torch.bfloat16 else {}
    return {
        "part": "decode",
        "group": name_of(kept),
        "size": batch * length,
        "batch": batch,
        "length": length,
        "us": took * 1e6,
        "gb_s": read / took / 1e9,
        "of_copy": read / took / copied,
        **shares(peaks.least_seconds(read, 0, 2), took, others),
    }


def prefill(batch: int, length: int, peaks: Peaks) -> Row:
    """Whole prompts, causal."""
    q, cache, rows, _ = paged(batch, length, length, torch.bfloat16)
    took = seconds(lambda: paged_attention(q, cache, rows, AttentionOptions(DIM**-0.5)))
    work = 2 * HEADS * DIM * batch * length * length
    moved = 2 * q.nbytes + batch * length * 2 * KV_HEADS * DIM * 2
    others = peers(q, batch, length, length)
    return {
        "part": "prefill",
        "group": f"batch {batch}",
        "size": length,
        "us": took * 1e6,
        "tflop_s": work / took / 1e12,
        **shares(peaks.least_seconds(moved, work, 2), took, others),
        **{f"{name}_tflop_s": work / other / 1e12 for name, other in others.items()},
    }


def cascade(batch: int, prefix: int, peaks: Peaks) -> Row:
    """One token of each of `batch` rows that share a prefix, looked at once; beside the same without."""
    q, cache, rows, _ = paged(batch, prefix + OWN, 1, torch.bfloat16)
    rows.tables[:, : prefix // BLOCK] = rows.tables[0, : prefix // BLOCK]
    each = torch.full_like(rows.contexts, prefix)
    starts = torch.tensor([0, batch], dtype=torch.int32, device="cuda")
    shared = Shared(starts, each[:1], rows.tables[:1], each, batch, prefix)
    options, split = AttentionOptions(DIM**-0.5), dataclasses.replace(rows, shared=shared)
    took, apart = (seconds(functools.partial(paged_attention, q, cache, one, options)) for one in (split, rows))
    read = (prefix + batch * OWN) * 2 * KV_HEADS * DIM * 2
    work = 4 * HEADS * DIM * batch * (prefix + OWN)
    return {
        "part": "cascade",
        "group": f"{batch} rows",
        "size": prefix,
        "us": took * 1e6,
        "without_us": apart * 1e6,
        "over_without": apart / took,
        **shares(peaks.least_seconds(read, work, 2), took, {}),
    }


def shares(least: float, took: float, others: Mapping[str, float]) -> Row:
    """Of the roofline, ours and SDPA's; and each other's time."""
    found: Row = {"of_roofline": least / took, **{f"{name}_us": other * 1e6 for name, other in others.items()}}
    return found | ({"torch_of_roofline": least / others["sdpa"]} if "sdpa" in others else {})


def peers(q: Tensor, batch: int, length: int, num: int) -> dict[str, float]:
    """Seconds of others on keys and values that are contiguous already, which ours are not; what is missing is left
    out."""
    queries = q.view(batch, num, HEADS, DIM).transpose(1, 2)
    k, v = (torch.randn(batch, KV_HEADS, length, DIM, device="cuda", dtype=q.dtype) for _ in range(2))
    found = {"sdpa": seconds(lambda: F.scaled_dot_product_attention(queries, k, v, is_causal=num > 1, enable_gqa=True))}
    if num > 1 and importlib.util.find_spec("triton"):
        found |= flex(queries, k, v)
    if importlib.util.find_spec("flashinfer"):
        found |= flashinfer(q, batch, length, num)
    return found


def flex(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """FlexAttention with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = k.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention)
    return {"flex": seconds(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))}


def flashinfer(q: Tensor, batch: int, length: int, num: int) -> dict[str, float]:
    """FlashInfer's paged wrappers, where the package is installed."""
    import flashinfer as peer

    width = -(-length // BLOCK)
    cache = torch.randn(batch * width, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=q.dtype)
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    pointers = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * width
    indices = torch.randperm(batch * width, device="cuda").int()
    last = torch.full((batch,), (length - 1) % BLOCK + 1, dtype=torch.int32, device="cuda")
    if num == 1:
        wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(space, use_tensor_cores=True)
        wrapper.plan(pointers, indices, last, HEADS, KV_HEADS, DIM, BLOCK, q_data_type=q.dtype)
    else:
        wrapper = peer.BatchPrefillWithPagedKVCacheWrapper(space)
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * num
        wrapper.plan(starts, pointers, indices, last, HEADS, KV_HEADS, DIM, BLOCK, causal=True, q_data_type=q.dtype)
    return {"flashinfer": seconds(lambda: wrapper.run(q, cache))}


def tune(*, is_fresh: bool) -> None:
    """Try tiles for each shape that this GPU's table does not have yet, and write the fastest after each."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    path = configs.table_path(gpu.name)
    path.parent.mkdir(exist_ok=True)
    best = {} if is_fresh else dict(configs.tuned_for(gpu.name))
    for kept in kept_as():
        shape = Shape(DIM, HEADS // KV_HEADS, kept.itemsize, gpu.capability)
        for kind, rows, num, blocks in (("split", (32, 8192), 1, (16,)), ("prefill", (1, 8192), 8192, (64, 128))):
            if shape.key(kind) in best:
                continue
            q, cache, batch, scales = paged(*rows, num, kept)
            call = functools.partial(paged_attention, q, cache, batch, AttentionOptions(DIM**-0.5), scales)
            tries = [Tiles(*one) for one in itertools.product(blocks, (32, 64, 128), (4, 8), (2, 3, 4))]
            best[shape.key(kind)] = min(tries, key=functools.partial(tried, gpu.name, shape.key(kind), call))
            print(f"{shape.key(kind)}: {best[shape.key(kind)]}", flush=True)
            path.write_text(json.dumps({key: dataclasses.asdict(one) for key, one in best.items()}, indent=2) + "\n")
    configs.tuned_for.cache_clear()


def tried(gpu: str, key: str, call: Callable[[], object], tiles: Tiles) -> float:
    """Seconds of a call with these tiles; infinite where they do not fit."""
    configs.tuned_for(gpu)[key] = tiles
    try:
        return seconds(call)
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
        print(tiles, error)
        return float("inf")


if __name__ == "__main__":
    sys.exit(main())
