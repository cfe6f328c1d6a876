"""Compares attention on one GPU with its roofline and with torch's SDPA, FlexAttention and FlashInfer.

    python -m benchmarks.gpu_attention [--parts decode,prefill,cascade] [--fresh] [--seconds N] [--out DIR] [--dry-run]

Median of 100 runs, the L2 cache flushed before each. Percentages of what the GPU is specified with and of the bandwidth
that a copy reaches here. A run that was stopped goes on where it was; --fresh begins again.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_cases import CaseDevice
from benchmarks.gpu_command import Ground, asked
from benchmarks.gpu_peers import Problem, figures
from benchmarks.gpu_results import Row
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.triton.attention import paged_attention

PARTS = ("decode", "prefill", "cascade")


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads, and the measured sizes: (rows, keys of each); of a cascade (rows, shared keys), beside `own`."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 32
    decodes: tuple[tuple[int, int], ...] = (
        (32, 8192),
        (1, 8192),
        (64, 8192),
        (8, 8192),
        (1, 32768),
        (256, 4096),
        (32, 4096),
        (1, 1024),
    )
    prefills: tuple[tuple[int, int], ...] = ((1, 4096), (1, 16384), (4, 4096), (16, 1024), (1, 1024))
    cascades: tuple[tuple[int, int], ...] = ((32, 8192), (4, 8192), (32, 1024), (128, 2048))
    own: int = 512

    @property
    def options(self) -> AttentionOptions:
        """Plain attention."""
        return AttentionOptions(self.dim**-0.5)


SIZES = AttentionSizes()
DRY = AttentionSizes(4, 2, 64, 16, ((2, 40), (1, 20)), ((1, 20),), ((2, 32),), 8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what has no result yet, and reports failures."""
    given = asked("gpu_attention", __doc__, PARTS, arguments)
    sizes = DRY if given.ground.is_dry else SIZES
    return given.run([(key, call) for key, call in todo(given.ground, sizes) if key.split(":")[0] in given.parts])


def todo(ground: Ground, sizes: AttentionSizes) -> list[tuple[str, Callable[[], Row]]]:
    """Every decode for each format of the cache, then prefills, and decodes of rows that share a prefix."""
    found: list[tuple[str, Callable[[], Row]]] = []
    for kept, (batch, length) in itertools.product(kept_as(ground), sizes.decodes):
        key = f"decode: {name_of(kept)}, {batch} x {length}"
        found.append((key, functools.partial(decode, ground, sizes, batch, length, kept)))
    for batch, length in sizes.prefills:
        found.append((f"prefill: {batch} x {length}", functools.partial(prefill, ground, sizes, batch, length)))
    for batch, shared in sizes.cascades:
        found.append((f"cascade: {batch} x {shared}", functools.partial(cascade, ground, sizes, batch, shared)))
    return found


def name_of(dtype: torch.dtype) -> str:
    """The name of a number format in results."""
    return str(dtype).removeprefix("torch.")


def kept_as(ground: Ground) -> list[torch.dtype]:
    """The number formats of caches on that device."""
    return [ground.at.dtype, *([torch.float8_e4m3fn] if ground.has_fp8 else []), torch.int8]


def paged(
    at: CaseDevice, sizes: AttentionSizes, batch: int, length: int, num: int, kept: torch.dtype
) -> tuple[Tensor, Tensor, Ragged, Tensor | None]:
    """Queries, a cache whose blocks are in random order, rows of `num` tokens, scales."""
    width = -(-length // sizes.block)
    cache, scales = cache_of(at, sizes, batch * width + 1, kept)
    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
    rows = Ragged.of(np.full(batch, num), np.full(batch, length), order, at.device)
    return at.randn(batch * num, sizes.heads, sizes.dim), cache, rows, scales


def cache_of(at: CaseDevice, sizes: AttentionSizes, num_blocks: int, kept: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Random keys and values as the engine keeps them on a GPU, and in 8 bits their scales."""
    shape = num_blocks, 2, sizes.kv_heads, sizes.block, sizes.dim
    numbers = torch.randn(shape, device=at.device, dtype=at.dtype)
    return slots.parts(slots.encode(numbers, kept, slots.GPU_ALIGN).permute(0, 3, 1, 2, 4), sizes.dim)


def decode(ground: Ground, sizes: AttentionSizes, batch: int, length: int, kept: torch.dtype) -> Row:
    """One token of each of `batch` rows."""
    q, cache, rows, scales = paged(ground.at, sizes, batch, length, 1, kept)
    took = ground.clock(lambda: paged_attention(q, cache, rows, sizes.options, scales))
    each = sizes.dim * kept.itemsize + (4 if scales is not None else 0)
    read = batch * length * 2 * sizes.kv_heads * each
    problem = Problem(q, batch, length, 1, sizes.kv_heads, sizes.block)
    return {
        "part": "decode",
        "group": name_of(kept),
        "size": batch * length,
        "batch": batch,
        "length": length,
        "us": took * 1e6,
        "gb_s": read / took / 1e9,
        "of_copy": read / took / ground.copied,
        **shares(
            ground.peaks.least_seconds(read, 0, 2),
            took,
            figures(problem, ground, took) if kept is ground.at.dtype else {},
        ),
    }


def prefill(ground: Ground, sizes: AttentionSizes, batch: int, length: int) -> Row:
    """Whole prompts, causal."""
    q, cache, rows, _ = paged(ground.at, sizes, batch, length, length, ground.at.dtype)
    took = ground.clock(lambda: paged_attention(q, cache, rows, sizes.options))
    work = 2 * sizes.heads * sizes.dim * batch * length * length
    moved = 2 * q.nbytes + batch * length * 2 * sizes.kv_heads * sizes.dim * 2
    problem = Problem(q, batch, length, length, sizes.kv_heads, sizes.block)
    return {
        "part": "prefill",
        "group": f"batch {batch}",
        "size": length,
        "us": took * 1e6,
        "tflop_s": work / took / 1e12,
        **shares(ground.peaks.least_seconds(moved, work, 2), took, figures(problem, ground, took, work)),
    }


def cascade(ground: Ground, sizes: AttentionSizes, batch: int, prefix: int) -> Row:
    """One token of each of `batch` rows that share a prefix, attended to once, beside the same without sharing."""
    q, cache, rows, _ = paged(ground.at, sizes, batch, prefix + sizes.own, 1, ground.at.dtype)
    rows.tables[:, : prefix // sizes.block] = rows.tables[0, : prefix // sizes.block]
    each = torch.full_like(rows.contexts, prefix)
    starts = torch.tensor([0, batch], dtype=torch.int32, device=ground.at.device)
    split = dataclasses.replace(rows, shared=SharedPrefixRows(starts, each[:1], rows.tables[:1], each, batch, prefix))
    calls = (functools.partial(paged_attention, q, cache, one, sizes.options) for one in (split, rows))
    took, apart = (ground.clock(call) for call in calls)
    read = (prefix + batch * sizes.own) * 2 * sizes.kv_heads * sizes.dim * 2
    work = 4 * sizes.heads * sizes.dim * batch * (prefix + sizes.own)
    return {
        "part": "cascade",
        "group": f"{batch} rows",
        "size": prefix,
        "us": took * 1e6,
        "without_us": apart * 1e6,
        "over_without": apart / took,
        **shares(ground.peaks.least_seconds(read, work, 2), took, {}),
    }


def shares(least: float, took: float, others: Mapping[str, object]) -> Row:
    """The shares of the roofline of ours and of SDPA, and the times of other implementations."""
    found: Row = {"of_roofline": least / took, **others}
    return found | ({"torch_of_roofline": least * 1e6 / float(str(others["sdpa_us"]))} if "sdpa_us" in others else {})


if __name__ == "__main__":
    sys.exit(main())
