"""Attention on one GPU against its roofline and against what else there is: torch's SDPA, FlexAttention, FlashInfer.

    python -m benchmarks.gpu_attention [--tune]

Median of 100 runs, the L2 cache flushed before each. Percentages of the bandwidth that the GPU is specified with and of
the one that a copy reaches here. `--tune` tries configurations and writes the best to `kernels/triton/tuned`.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu_clock import about_gpu, copy_bandwidth, peaks_of, seconds
from benchmarks.machine import write
from kernels.ragged import AttentionOptions, Ragged
from kernels.triton import configs
from kernels.triton.attention import gpu_of, paged_attention
from kernels.triton.configs import Shape, Tiles

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 32
DECODES = [(1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 4096), (32, 8192), (64, 8192), (128, 2048)]
PREFILLS = [(1, 4096), (1, 16384), (4, 4096), (16, 1024)]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    if parser.parse_args().tune:
        tune()
    about, copied = about_gpu(), copy_bandwidth()
    peaks = peaks_of(str(about["gpu"]), copied)
    decodes = [decode(*case, kept, peaks.bandwidth, copied) for kept in kept_as() for case in DECODES]
    prefills = [prefill(*case, peaks.products[2]) for case in PREFILLS]
    write(
        "gpu_attention",
        "python -m benchmarks.gpu_attention",
        {**about, "copy_tb_s": copied / 1e12, "decode": decodes, "prefill": prefills},
    )


def kept_as() -> list[torch.dtype]:
    """Number formats of caches that this GPU has."""
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    return [torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if has_fp8 else [])]


def paged(batch: int, length: int, num: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Ragged, Tensor | None]:
    """Queries, a cache whose blocks are in random order, rows of `num` tokens, scales."""
    width = -(-length // BLOCK)
    memory = torch.randn(batch * width + 1, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    cache = memory.to(kept).permute(0, 3, 1, 2, 4)
    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
    rows = Ragged.of(np.full(batch, num), np.full(batch, length), order, torch.device("cuda"))
    q = torch.randn(batch * num, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    scales = torch.ones(cache.shape[:4], device="cuda") if kept.itemsize == 1 else None
    return q, cache, rows, scales


def decode(batch: int, length: int, kept: torch.dtype, bandwidth: float, copied: float) -> dict[str, object]:
    """One token of each of `batch` rows."""
    q, cache, rows, scales = paged(batch, length, 1, kept)
    took = seconds(lambda: paged_attention(q, cache, rows, AttentionOptions(DIM**-0.5), scales))
    read = batch * length * 2 * KV_HEADS * (DIM * kept.itemsize + (4 if scales is not None else 0))
    others = peers(q, batch, length, 1) if kept is torch.bfloat16 else {}
    return {
        "batch": batch,
        "length": length,
        "cache": str(kept).removeprefix("torch."),
        "us": took * 1e6,
        "of_specified": read / took / bandwidth,
        "of_copy": read / took / copied,
        **{f"{name}_us": other * 1e6 for name, other in others.items()},
    }


def prefill(batch: int, length: int, flops: float) -> dict[str, object]:
    """Whole prompts, causal."""
    q, cache, rows, _ = paged(batch, length, length, torch.bfloat16)
    took = seconds(lambda: paged_attention(q, cache, rows, AttentionOptions(DIM**-0.5)))
    work = 2 * HEADS * DIM * batch * length * length
    others = peers(q, batch, length, length)
    return {
        "batch": batch,
        "length": length,
        "us": took * 1e6,
        "tflop_s": work / took / 1e12,
        "of_specified": work / took / flops if flops else None,
        **{f"{name}_tflop_s": work / other / 1e12 for name, other in others.items()},
    }


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


def tune() -> None:
    """Try tiles for each shape and write the fastest for this GPU."""
    gpu, best = gpu_of(torch.device("cuda", torch.cuda.current_device())), {}
    for kept in kept_as():
        shape = Shape(DIM, HEADS // KV_HEADS, kept.itemsize, gpu.capability)
        for kind, rows, num, blocks in (("split", (32, 8192), 1, (16,)), ("prefill", (1, 8192), 8192, (64, 128))):
            q, cache, batch, scales = paged(*rows, num, kept)
            call = functools.partial(paged_attention, q, cache, batch, AttentionOptions(DIM**-0.5), scales)
            tries = [Tiles(*one) for one in itertools.product(blocks, (32, 64, 128), (4, 8), (2, 3, 4))]
            best[shape.key(kind)] = min(tries, key=functools.partial(tried, gpu.name, shape.key(kind), call))
    path = configs.table_path(gpu.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({key: dataclasses.asdict(tiles) for key, tiles in best.items()}, indent=2) + "\n")
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
    main()
