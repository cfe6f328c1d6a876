"""Stand-ins for libraries of attention: their published signatures, over the definition in torch."""

import types
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged
from sluice_server.kernels.reference import definitions


def flash_attn_with_kvcache(  # noqa: PLR0913 # as published
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """FlashAttention 3, of the package `flash_attn_interface`."""
    given = (k, v, qv, rotary_cos, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, q_descale, scheduler_metadata)
    assert given == (None,) * len(given) and causal and not attention_chunk and not return_softmax_lse
    assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
    assert max_seqlen_q is not None and softmax_scale is not None
    numbers = softmax_scale, softcap, window_size[0], max_seqlen_q
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    return computed(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, numbers)


class VllmOperator:
    """vLLM's `_vllm_fa3_C.fwd`, whose arguments have no defaults."""

    def __call__(self, *given: Any) -> list[Tensor]:  # noqa: ANN401 # tensors, numbers and None
        assert len(given) == 37
        q, keys, values, *_ = given
        starts, contexts, most, longest, tables = given[7], given[11], given[12], given[13], given[14]
        scale, is_causal, left, right, cap = given[23:28]
        assert is_causal and longest >= int(contexts.max()) and right == (0 if left >= 0 else -1)
        assert given[3:7] == (None,) * 4 and given[15:23] == (None,) * 8 and given[28:] == TAIL
        return [computed(q, keys, values, contexts, tables, starts, (scale, cap, left, most)), q, q, q]


TAIL = (True, None, 0, None, 0, None, 1, 0, None)


class PrefillWrapper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`: a plan on the host, and then a run for each layer."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "NHD"

    def plan(  # noqa: PLR0913 # as published, as far as it is used
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal and sm_scale is not None
        type(self).num_plans += 1
        ends, last = paged_kv_indptr.numpy(), paged_kv_last_page_len.numpy()
        nums = np.diff(ends)
        assert len(paged_kv_indices) == ends[-1] and (last >= 1).all() and (last <= page_size).all()
        self._tables = np.zeros((len(nums), int(nums.max())), dtype=np.int32)
        for row, (start, num) in enumerate(zip(ends, nums, strict=False)):
            self._tables[row, :num] = paged_kv_indices[start : start + num]
        self._starts, self._contexts = qo_indptr, torch.from_numpy(((nums - 1) * page_size + last).astype(np.int32))
        self._sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._dtypes = q_data_type, kv_data_type
        self._numbers = sm_scale, logits_soft_cap or 0.0, window_left, 0

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == self._sizes
        assert (q.dtype, keys.dtype) == self._dtypes and len(q) == int(self._starts[-1])
        tables = torch.from_numpy(self._tables)
        host = self._contexts.to(q.device), tables.to(q.device), self._starts.to(q.device)
        return out.copy_(computed(q, keys, values, *host, self._numbers))


FLASHINFER = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper)


def computed(  # noqa: PLR0913 # all that attention depends on
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    contexts: Tensor,
    tables: Tensor,
    starts: Tensor,
    numbers: tuple[float, float, int, int],
) -> Tensor:
    """One call of torch, so that what watches these sees it as one; [T or more, heads, D]."""
    given = q, keys, values, contexts, tables, starts
    if has_torch_function(given):
        found: Tensor = handle_torch_function(computed, given, *given, numbers)
        return found
    scale, cap, left, _ = numbers
    num = len(contexts)
    assert len(starts) == num + 1 and len(tables) == num and q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    counts = starts.diff()
    rows = Ragged(
        *(starts, contexts, tables, int(starts[-1]), num, bool((counts == 1).any())),
        *(int(counts.max()), int(contexts.max())),
    )
    options = AttentionOptions(scale, None if left < 0 else left + 1, cap)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    if not rows.num_tokens:  # before a step is recorded
        return out
    seen = definitions.ragged_attention(q, torch.stack([keys, values], 2), rows, options)
    out[: rows.num_tokens] = seen.view(-1, *q.shape[1:]).to(q.dtype)
    return out
