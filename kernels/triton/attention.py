"""Launches attention over the paged cache on a GPU: one interface for ragged queries, and the choice of schedules.

Rows of one token, of drafts or of a tree use the split schedule, longer rows the prefill schedule. A prefix that rows
share is read once for all of them. Grid sizes follow from bounds on the host, so that no launch waits for the device.
Independent of models and requests.
"""

import dataclasses
import functools

import torch
import triton
from torch import Tensor

from sluice_server.kernels.layout.ragged import MAX_TREE, AttentionOptions, Ragged
from sluice_server.kernels.triton import configs
from sluice_server.kernels.triton.attention_merge import attention_merge_kernel
from sluice_server.kernels.triton.attention_prefill import attention_prefill_kernel
from sluice_server.kernels.triton.attention_split import attention_split_kernel
from sluice_server.kernels.triton.configs import AttentionShape
from sluice_server.kernels.triton.numbers import next_power_of_two

SHORT = 16  # the split schedule computes all rows of a step if none has more tokens than this
MERGED = 16  # parts that one load reads


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTraits:
    """Properties of a GPU on which the choice of schedules depends."""

    name: str
    capability: int
    num_multiprocessors: int


@functools.cache
def gpu_of(device: torch.device) -> GpuTraits:
    """Returns the properties of a device; fixed ones for the interpreter on a CPU."""
    if device.type != "cuda":
        return GpuTraits("", 90, 2)
    found = torch.cuda.get_device_properties(device)
    return GpuTraits(found.name, 10 * found.major + found.minor, found.multi_processor_count)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    batch: Ragged,
    options: AttentionOptions,
    scales: Tensor | None = None,
    gpu: GpuTraits | None = None,
) -> Tensor:
    """Computes attention over the paged cache; see `kernels.ops.paged_attention`.

    Args:
        q: [T or more, heads, D], the last dimension contiguous.
        cache: [num_blocks, block_size, 2, kv_heads, D] without scales; any strides but the last.
        scales: float32 [num_blocks, block_size, 2, kv_heads] of a quantised cache, any strides.
        gpu: the GPU for which schedules are chosen; by default the one that computes.

    Returns:
        [q's rows, heads * D] in q's dtype; rows beyond the batch's are not written.

    Raises ValueError for a tree with a shared prefix or with a window below `MAX_TREE`.
    """
    if batch.tree is not None and (batch.shared is not None or (options.window or MAX_TREE) < MAX_TREE):
        raise ValueError(f"a tree of drafts has no shared prefix and no sliding window of less than {MAX_TREE}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    call = _Call(q, cache, batch, options, gpu or gpu_of(q.device), scales, out)
    if options.is_batch_invariant or batch.tree is not None or batch.max_query <= SHORT:
        call.split(batch.num_rows, batch.num_tokens, batch.max_query)
    else:
        if batch.is_mixed:  # each kernel finds its rows by their tokens
            call.split(batch.num_rows, batch.num_tokens, 1)
        elif batch.num_singles:
            call.split(batch.num_singles, batch.num_singles, 1)
        call.prefill()
    return out.view(len(q), -1)


def precision(dtype: torch.dtype) -> str:
    """Returns the input precision of products: three TF32 products for float32, nearly exact; unused for other
    formats."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments and the output of one attention over one layer's cache, with the launches of its kernels."""

    q: Tensor
    cache: Tensor
    batch: Ragged
    options: AttentionOptions
    gpu: GpuTraits
    scales: Tensor | None
    out: Tensor

    @property
    def shape(self) -> AttentionShape:
        group = self.q.shape[1] // self.cache.shape[3]
        return AttentionShape(self.q.shape[2], group, self.cache.dtype.itemsize, self.gpu.capability)

    def split(self, num_rows: int, num_tokens: int, max_query: int) -> None:
        """Runs the split schedule for those of the first `num_rows` rows, which have `num_tokens` tokens together, that
        have at most `max_query` tokens."""
        batch, heads, kv_heads = self.batch, self.q.shape[1], self.cache.shape[3]
        is_fixed = self.options.is_batch_invariant
        tiles = configs.split_tiles(self.shape, configs.FIXED_ROWS if is_fixed else max_query, self.gpu.name)
        num_blocks = triton.cdiv(max_query, tiles.block_m // self.shape.group)
        if is_fixed:
            splits = triton.cdiv(batch.max_context, configs.FIXED_SPLIT)
        else:
            programs = num_rows * num_blocks * kv_heads
            splits = configs.num_splits(programs, batch.max_context, self.gpu.num_multiprocessors)
        shared = None if self.options.window is not None or is_fixed else batch.shared
        before = self._prefix_splits() if shared is not None else 0
        slots = before + splits
        if slots == 1:
            parts = sums = self.out  # one part: nothing to merge
        else:
            parts = self.q.new_empty((num_tokens, heads, slots, self.q.shape[2]), dtype=torch.float32)
            sums = self.q.new_empty((num_tokens, heads, slots, 2), dtype=torch.float32)
            if shared is not None:
                sums.zero_()  # rows in no group get no results from the prefix pass
        if shared is not None:
            self._prefix_pass(parts, sums, slots, before)
        attention_split_kernel[(num_rows * num_blocks, kv_heads, splits)](
            self.q,
            self.cache,
            self._scales,
            batch.tables,
            batch.starts,
            batch.contexts,
            batch.contexts if shared is None else shared.prefixes,
            batch.starts if batch.tree is None else batch.tree,
            self._sinks,
            self._ends,
            self.out,
            parts,
            sums,
            *self._strides(batch.tables),
            self.options.scale,
            self.options.cap,
            self.options.window or 0,
            slots,
            before,
            num_blocks,
            max_query,
            **self._constants(tiles),
            KEYS=kv_heads,
            SPLIT=configs.FIXED_SPLIT if is_fixed else configs.LEAST_SPLIT,
            IS_FIXED=is_fixed,
            IS_WHOLE=slots == 1,
            IS_CAUSAL=True,
            HAS_PREFIX=shared is not None,
            HAS_TREE=batch.tree is not None,
            HAS_SINKS=self.options.sinks is not None,
            HAS_ENDS=batch.ends is not None,
        )
        if slots > 1:
            self._merge(parts, sums, slots, num_tokens)

    def prefill(self) -> None:
        """Runs the prefill schedule for all rows except those of one token."""
        batch, first = self.batch, self.batch.num_singles
        tiles = configs.prefill_tiles(self.shape, self.gpu.name)
        num_rows = batch.num_rows - first
        num_blocks = (batch.num_tokens - first) // (tiles.block_m // self.shape.group) + num_rows
        attention_prefill_kernel[(num_blocks, self.cache.shape[3])](
            self.q,
            self.cache,
            self._scales,
            batch.tables,
            batch.starts,
            batch.contexts,
            self._sinks,
            self._ends,
            self.out,
            *self._strides(batch.tables),
            self.options.scale,
            self.options.cap,
            self.options.window or 0,
            first,
            num_rows,
            2 if batch.is_mixed else 1,
            **self._constants(tiles),
            HAS_SINKS=self.options.sinks is not None,
            HAS_ENDS=batch.ends is not None,
        )

    def _prefix_splits(self) -> int:
        assert self.batch.shared is not None
        programs = len(self.batch.shared.lengths) * self.cache.shape[3]
        return configs.num_splits(programs, self.batch.shared.max_length, self.gpu.num_multiprocessors)

    def _prefix_pass(self, parts: Tensor, sums: Tensor, slots: int, splits: int) -> None:
        """Computes the shared prefixes: every query of a group sees every key of its prefix."""
        shared, kv_heads = self.batch.shared, self.cache.shape[3]
        assert shared is not None
        tiles = configs.split_tiles(self.shape, shared.max_rows, self.gpu.name)
        num_blocks = triton.cdiv(shared.max_rows, tiles.block_m // self.shape.group)
        attention_split_kernel[(len(shared.lengths) * num_blocks, kv_heads, splits)](
            self.q,
            self.cache,
            self._scales,
            shared.tables,
            shared.starts,
            shared.lengths,
            shared.lengths,
            shared.starts,
            self._sinks,
            shared.starts,
            self.out,
            parts,
            sums,
            *self._strides(shared.tables),
            self.options.scale,
            self.options.cap,
            0,
            slots,
            0,
            num_blocks,
            shared.max_rows,
            **self._constants(tiles),
            KEYS=kv_heads,
            SPLIT=configs.LEAST_SPLIT,
            IS_FIXED=False,
            IS_WHOLE=False,
            IS_CAUSAL=False,
            HAS_PREFIX=False,
            HAS_TREE=False,
            HAS_SINKS=False,
            HAS_ENDS=False,
        )

    def _merge(self, parts: Tensor, sums: Tensor, slots: int, num_tokens: int) -> None:
        heads, dim = self.q.shape[1:]
        attention_merge_kernel[(num_tokens, heads)](
            parts,
            sums,
            self.out,
            self.out.stride(0),
            slots,
            HEADS=heads,
            DIM=dim,
            WIDTH=next_power_of_two(dim),
            CHUNK=MERGED,
            num_warps=4,
        )

    @property
    def _scales(self) -> Tensor:
        return self.cache if self.scales is None else self.scales

    @property
    def _sinks(self) -> Tensor:
        return self.q if self.options.sinks is None else self.options.sinks

    @property
    def _ends(self) -> Tensor:
        return self.batch.starts if self.batch.ends is None else self.batch.ends

    def _strides(self, tables: Tensor) -> tuple[int, ...]:
        cache, scales = self.cache.stride()[:4], self._scales.stride()[:4]
        return (*self.q.stride()[:2], *cache, *scales, tables.stride(0), self.out.stride(0))

    def _constants(self, tiles: configs.AttentionTiles) -> dict[str, int | bool | str]:
        return {
            "GROUP": self.shape.group,
            "DIM": self.shape.dim,
            "WIDTH": self.shape.width,
            "BLOCK": self.cache.shape[1],
            "TILE": tiles.tile,
            "BLOCK_M": tiles.block_m,
            "HAS_WINDOW": self.options.window is not None,
            "HAS_CAP": self.options.cap > 0,
            "QUANTISED": self.scales is not None,
            "PRECISION": precision(self.q.dtype),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
