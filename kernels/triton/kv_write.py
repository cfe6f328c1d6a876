"""Norms and rotates queries and keys and writes keys and values into the paged cache, in one kernel.

Takes the heads of a step's tokens; stores rotated queries in place, and keys and values in their slots, quantised if
the cache is. The norm of each head (as in Qwen3) is optional; its result is rotated without being rounded. Cache and
scales are views in the logical order [blocks, offset, 2, kv_heads(, D)] with any strides. Independent of models and
requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.elementwise import HeadNorms
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.numbers import largest, next_power_of_two, pointer

HEADS = 8  # most heads of one program: enough independent loads to hide their latency, few enough for registers


@triton.jit
def kv_write_kernel(
    heads,  # [T, QUERIES + 2 · KEYS, DIM], rotated in place
    cis,  # float32 [T, DIM]: cosine and sine of each pair
    cache,  # [blocks, BLOCK, 2, KEYS, DIM]
    scales,  # float32 [blocks, BLOCK, 2, KEYS]; unused when not QUANTISED
    slots,  # int64 [T], -1 for a token that is not written
    norms,  # float32 [QUERIES + KEYS, DIM]; unused when not HAS_NORMS
    eps,
    heads_token,
    heads_head,
    cache_block,
    cache_offset,
    cache_kind,
    cache_head,
    scales_block,
    scales_offset,
    scales_kind,
    scales_head,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, rounded up to a power of two
    BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
    IS_DYNAMIC: tl.constexpr,  # scales are computed, one for each token and head; otherwise they are read
    IS_INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Norms, rotates and writes HEADS_BLOCK heads of a token. Grid: (tokens, ⌈heads / HEADS_BLOCK⌉)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    dim = tl.arange(0, WIDTH)
    pair = tl.arange(0, WIDTH // 2)
    is_key, is_value = (head >= QUERIES) & (head < QUERIES + KEYS), head >= QUERIES + KEYS
    mask = (head < QUERIES + 2 * KEYS)[:, None] & (dim < DIM)[None, :]

    place = heads + token * heads_token + head[:, None] * heads_head + dim[None, :]
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        is_normed = (head < QUERIES + KEYS)[:, None]
        weights = tl.load(norms + head[:, None] * DIM + dim[None, :], mask=mask & is_normed, other=0.0)
        x = tl.where(is_normed, x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * weights, x)
    even, odd = tl.split(tl.reshape(x, (HEADS_BLOCK, WIDTH // 2, 2)))
    cosine = tl.load(cis + token * DIM + 2 * pair, mask=pair < DIM // 2, other=1.0)[None, :]
    sine = tl.load(cis + token * DIM + 2 * pair + 1, mask=pair < DIM // 2, other=0.0)[None, :]
    cosine, sine = tl.where(is_value[:, None], 1.0, cosine), tl.where(is_value[:, None], 0.0, sine)
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    x = tl.reshape(turned, (HEADS_BLOCK, WIDTH))
    tl.store(place, x.to(heads.dtype.element_ty), mask=mask & (head < QUERIES)[:, None])

    slot = tl.load(slots + token)
    kind = is_value.to(tl.int32)
    key = head - QUERIES - kind * KEYS
    # The slot is made a vector, because the interpreter turns a scalar condition combined with others into an integer.
    is_kept = (is_key | is_value) & (head < QUERIES + 2 * KEYS) & (slot + 0 * head >= 0)
    block, offset = slot // BLOCK, slot % BLOCK
    if QUANTISED:
        own = scales + block * scales_block + offset * scales_offset + kind * scales_kind + key * scales_head
        if IS_DYNAMIC:
            scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-12) / LARGEST
            tl.store(own, scale, mask=is_kept)
        else:
            scale = tl.load(own, mask=is_kept, other=1.0)
        x = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST)
        if IS_INTEGER:
            x = tl.floor(x + 0.5)
    target = cache + block * cache_block + offset * cache_offset + kind * cache_kind + key * cache_head
    tl.store(target[:, None] + dim[None, :], x.to(cache.dtype.element_ty), mask=mask & is_kept[:, None])


def rotate_and_write(
    heads: Tensor,
    cis: Tensor,
    cache: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    norms: HeadNorms | None = None,
    *,
    is_dynamic: bool = True,
) -> None:
    """Rotates queries in place and writes rotated keys and values into the cache.

    Args:
        heads: [T or more, heads + 2 kv_heads, D]: queries, keys, values. The content of its keys afterwards is
            undefined.
        cis: complex64 [T or more, 1, D/2], rotations of neighbouring pairs.
        cache: [num_blocks, block_size, 2, kv_heads, D], any strides but the last.
        slots: int64 [T], cache slot of each token; -1 for a token that is not written.
        scales: float32 [num_blocks, block_size, 2, kv_heads] of a quantised cache, any strides. With `is_dynamic`, one
            is written for each token and head; otherwise they are used as they are, and values beyond their range
            saturate.
        norms: of queries and keys before their rotation; None without.
    """
    num_heads, dim = heads.shape[1:]
    _, block_size, _, keys, _ = cache.shape
    width = min(HEADS, next_power_of_two(num_heads))
    own, cis = cache if scales is None else scales, cis.view(cis.real.dtype)
    kv_write_kernel[(len(slots), triton.cdiv(num_heads, width))](
        heads,
        cis,
        cache,
        own,
        slots,
        cis if norms is None else norms.weights,
        0.0 if norms is None else norms.eps,
        heads.stride(0),
        heads.stride(1),
        *cache.stride()[:4],
        *own.stride()[:4],
        QUERIES=num_heads - 2 * keys,
        KEYS=keys,
        DIM=dim,
        WIDTH=next_power_of_two(dim),
        BLOCK=block_size,
        HEADS_BLOCK=width,
        QUANTISED=scales is not None,
        IS_DYNAMIC=is_dynamic,
        IS_INTEGER=not cache.dtype.is_floating_point,
        LARGEST=largest(cache.dtype),
        HAS_NORMS=norms is not None,
    )


def _case(
    name: str,
    kept: torch.dtype,
    dim: int = 128,
    *,
    is_quick: bool = False,
    since: int = 80,
    has_norms: bool = False,
) -> AotCase:
    types = dict.fromkeys(kv_write_kernel.arg_names[7:17], "i32")
    types |= {"heads": "*bf16", "cis": "*fp32", "cache": pointer(kept), "slots": "*i64", "norms": "*fp32"}
    types["eps"] = "fp32"
    types["scales"] = "*fp32" if kept.itemsize == 1 else pointer(kept)
    constants = {
        "QUERIES": 32,
        "KEYS": 8,
        "DIM": dim,
        "WIDTH": next_power_of_two(dim),
        "BLOCK": 32,
        "HEADS_BLOCK": HEADS,
        "QUANTISED": kept.itemsize == 1,
        "IS_DYNAMIC": True,
        "IS_INTEGER": not kept.is_floating_point,
        "LARGEST": largest(kept),
        "HAS_NORMS": has_norms,
    }
    # Strides of scales are small, such as 1 or kv_heads, and so not divisible by 16.
    unaligned = frozenset(name for name in types if name.startswith("scales_"))
    vectors = frozenset({"loads", "stores"})
    return AotCase(
        f"kv_write/{name}",
        kv_write_kernel,
        types,
        constants,
        unaligned,
        vectors=vectors,
        since=since,
        is_quick=is_quick,
    )


CASES = (
    _case("bf16-d128", torch.bfloat16, is_quick=True),
    _case("bf16-d64", torch.bfloat16, 64),
    _case("bf16-d80", torch.bfloat16, 80),
    _case("bf16-d256", torch.bfloat16, 256),
    _case("int8-d128", torch.int8, is_quick=True),
    _case("fp8-d128", torch.float8_e4m3fn, since=90),
    _case("normed-bf16-d128", torch.bfloat16, is_quick=True, has_norms=True),
    _case("normed-bf16-d256", torch.bfloat16, 256, has_norms=True),
    _case("normed-int8-d128", torch.int8, has_norms=True),
    _case("normed-fp8-d128", torch.float8_e4m3fn, since=90, has_norms=True),
)
