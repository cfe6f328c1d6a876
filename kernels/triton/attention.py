"""Launches attention over the paged cache on a GPU: one interface for ragged queries, and the choice of schedules.

Rows of one token, of drafts or of a tree use the split schedule, longer rows the prefill schedule. A prefix that rows
share is read once for all of them. Plans on the device (`attention_plan`) divide the keys among programs; grid sizes
follow from bounds on the host, so that no launch waits for the device. Independent of models and requests.
"""

import dataclasses

import torch
from torch import Tensor

from sluice_server.kernels.layout.ragged import MAX_TREE, AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.triton import configs
from sluice_server.kernels.triton.attention_merge import attention_merge_kernel
from sluice_server.kernels.triton.attention_plan import AttentionPlan, Division, PlannedRows, planned
from sluice_server.kernels.triton.attention_prefill import attention_prefill_kernel
from sluice_server.kernels.triton.attention_split import attention_split_kernel
from sluice_server.kernels.triton.configs import AttentionShape
from sluice_server.kernels.triton.dependent import dependent
from sluice_server.kernels.triton.gpu_traits import GpuTraits, gpu_of
from sluice_server.kernels.triton.numbers import next_power_of_two

SHORT = 16  # the split schedule computes all rows of a step if none has more tokens than this
MERGED = 16  # parts that one load reads


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
        cache: [num_blocks, block_size, 2, kv_heads, D] without scales; any strides but the last, even ones in 8 bits.
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
        call.split(batch.max_query)
    else:  # each kernel gets its rows by their tokens
        if batch.has_singles:
            call.split(1)
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

    def split(self, most: int) -> None:
        """Runs the split schedule for the rows that have at most `most` tokens."""
        batch, is_fixed = self.batch, self.options.is_batch_invariant
        shared = None if self.options.window is not None or is_fixed else batch.shared
        before = None if shared is None else self._prefix_pass(shared)
        tiles = configs.split_tiles(self.shape, configs.FIXED_ROWS if is_fixed else most, self.gpu.name)
        for_each = configs.split_programs(batch.num_rows, self.cache.shape[3], self.gpu.num_multiprocessors)
        division = self._division(tiles, for_each, most=most)._replace(
            part=configs.FIXED_SPLIT if is_fixed else configs.LEAST_SPLIT,
            is_fixed=is_fixed,
            is_causal=batch.tree is None,
            is_merged=shared is not None,
        )
        rows = PlannedRows(batch.starts, batch.contexts, None if shared is None else shared.prefixes, ends=batch.ends)
        plan = self._plan(rows, (batch.num_rows, batch.num_tokens, most, batch.max_context), division)
        self._compute(plan, tiles, batch.starts, batch.contexts, batch.tables, is_fixed=is_fixed, has_sinks=True)
        self._merge(plan, before, is_fixed=is_fixed)

    def prefill(self) -> None:
        """Runs the prefill schedule for all rows except those of one token."""
        batch, tiles = self.batch, configs.prefill_tiles(self.shape, self.gpu.name)
        division = self._division(tiles, configs.PREFILL_PROGRAMS, least=2, most=batch.max_query)
        division = division._replace(part=configs.LEAST_PREFILL_SPLIT)
        bounds = batch.num_rows, batch.num_tokens, batch.max_query, batch.max_context
        plan = self._plan(PlannedRows(batch.starts, batch.contexts, ends=batch.ends), bounds, division)
        attention_prefill_kernel[(len(plan.items) * self.cache.shape[3],)](
            self.q,
            self.cache,
            self._scales,
            batch.tables,
            batch.starts,
            batch.contexts,
            self._sinks,
            self._ends,
            self.out,
            plan.items,
            plan.parts,
            plan.sums,
            *self._strides(batch.tables),
            self.options.scale,
            self.options.cap,
            self.options.window or 0,
            **self._constants(tiles),
            HAS_WINDOW=self.options.window is not None,
            HAS_SINKS=self.options.sinks is not None,
            HAS_ENDS=batch.ends is not None,
        )
        self._merge(plan, None, is_fixed=False)

    def _prefix_pass(self, shared: SharedPrefixRows) -> AttentionPlan:
        """Computes the shared prefixes, of which every query of a group sees every key; returns their parts."""
        tiles = configs.split_tiles(self.shape, shared.max_rows, self.gpu.name)
        division = self._division(tiles, configs.SPLIT_PROGRAMS, most=shared.max_rows)
        division = division._replace(is_causal=False, is_merged=True)
        bounds = len(shared.lengths), self.batch.num_tokens, shared.max_rows, shared.max_length
        plan = self._plan(PlannedRows(shared.starts, shared.lengths), bounds, division)
        self._compute(
            plan, tiles, shared.starts, shared.lengths, shared.tables, is_fixed=False, has_sinks=False, sees_all=True
        )
        return plan

    def _division(self, tiles: configs.AttentionTiles, for_each: int, *, least: int = 1, most: int) -> Division:
        """Returns how keys are divided among programs, `for_each` multiprocessor."""
        return Division(
            least=least,
            most=most,
            block=tiles.block_m // self.shape.group,
            tile=tiles.tile,
            part=configs.LEAST_SPLIT,
            programs=configs.programs(for_each, self.gpu.num_multiprocessors, self.cache.shape[3]),
            window=self.options.window or 0,
        )

    def _plan(self, rows: PlannedRows, bounds: tuple[int, int, int, int], division: Division) -> AttentionPlan:
        """Returns the plan for rows, which all layers of a step share."""
        plans: dict[object, AttentionPlan] = self.batch.plans
        heads, dim = self.q.shape[1:]
        key = bounds, division, heads, dim
        if key not in plans:
            plans[key] = planned(rows, bounds, division, heads, dim)
        return plans[key]

    def _compute(
        self,
        plan: AttentionPlan,
        tiles: configs.AttentionTiles,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        *,
        is_fixed: bool,
        has_sinks: bool,
        sees_all: bool = False,
    ) -> None:
        tree = None if sees_all else self.batch.tree
        window = None if sees_all else self.options.window
        attention_split_kernel[(len(plan.items) * self.cache.shape[3],)](
            self.q,
            self.cache,
            self._scales,
            tables,
            starts,
            contexts,
            starts if tree is None else tree,
            self._sinks,
            self._ends,
            self.out,
            plan.items,
            plan.parts,
            plan.sums,
            *self._strides(tables),
            self.options.scale,
            self.options.cap,
            window or 0,
            **self._constants(tiles),
            SPLIT=configs.FIXED_SPLIT if is_fixed else 0,
            IS_CAUSAL=tree is None and not sees_all,
            HAS_TREE=tree is not None,
            HAS_WINDOW=window is not None,
            HAS_SINKS=has_sinks and self.options.sinks is not None,
            HAS_ENDS=self.batch.ends is not None and not sees_all,
            **dependent(self.q),
        )

    def _merge(self, plan: AttentionPlan, before: AttentionPlan | None, *, is_fixed: bool) -> None:
        """Merges what is in parts, if anything can be."""
        if not len(plan.entries):
            return
        heads, dim = self.q.shape[1:]
        first = before or plan
        attention_merge_kernel[(len(plan.entries), heads)](
            plan.entries,
            plan.parts,
            plan.sums,
            first.entries,
            first.parts,
            first.sums,
            self._sinks,
            self.out,
            self.out.stride(0),
            HEADS=heads,
            DIM=dim,
            WIDTH=next_power_of_two(dim),
            CHUNK=1 if is_fixed else MERGED,
            HAS_BEFORE=before is not None,
            HAS_SINKS=self.options.sinks is not None,
            num_warps=4,
            **dependent(self.q),
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
            "KEYS": self.cache.shape[3],
            "GROUP": self.shape.group,
            "DIM": self.shape.dim,
            "WIDTH": self.shape.width,
            "BLOCK": self.cache.shape[1],
            "TILE": tiles.tile,
            "BLOCK_M": tiles.block_m,
            "HAS_CAP": self.options.cap > 0,
            "QUANTISED": self.scales is not None,
            "PRECISION": precision(self.q.dtype),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
