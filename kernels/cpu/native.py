"""Our own CPU kernels (kernels/cpu, C++), as functions of tensors: activations in float32, contiguous where it is said;
weights and cache in the formats that a function names. Which kernels these are says `kernels.cpu.builds`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds, memory
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference.automaton import SuffixAutomaton

NO_NORM = -1.0
ALL_TOKENS = -1  # as in kernels/cpu/layer.h
STORE, ADD = 0, 1  # what becomes of a product; as in kernels/cpu/panels.h
GATES = {"silu": 2, "gelu_tanh": 3, "clamped": 4}  # and with a gate, by its activation
FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3  # formats of a weight; as in kernels/cpu/layer.h
LANES = 16  # head sizes must be multiples of it
MAX_HEAD_DIM = 256
SCALE_BYTES = 4  # behind the levels of one head's key or value in a cache of 8 bits: their scale, float32


def takes(q: Tensor, cache: Tensor) -> bool:
    """Whether attention of q [.., D] over a cache layer may run here: float32, over what `attends` names."""
    return builds.MODULE is not None and q.dtype is torch.float32 and attends(q.shape[-1], cache)


def attends(dim: int, cache: Tensor) -> bool:
    """Whether kernels take heads of that size over a cache layer: of float32, bfloat16 or int8 (`SCALE_BYTES`)."""
    return cache.dtype in (torch.float32, torch.bfloat16, torch.int8) and cache.is_cpu and has_heads_of(dim)


def has_heads_of(dim: int) -> bool:
    """Whether kernels of attention take heads of that size."""
    return dim % LANES == 0 and dim <= MAX_HEAD_DIM


def pack(weight: Tensor, gated: bool) -> Tensor:
    """weight [N, K], float32 or bfloat16, in panels: [packed size]. Gated: row i of the first half beside row i of the
    second."""
    assert builds.MODULE is not None
    weight = weight.contiguous()
    rows, inputs = weight.shape
    size, call = {
        torch.bfloat16: (builds.MODULE.packed_size_bfloat16, builds.MODULE.pack_bfloat16),
        torch.float32: (builds.MODULE.packed_size_float32, builds.MODULE.pack_float32),
    }[weight.dtype]
    packed = memory.empty(size(rows, inputs, int(gated)), weight.dtype)
    call(weight.data_ptr(), packed.data_ptr(), rows, inputs, int(gated))
    return packed


def pack_levels(levels: Tensor, bits: int, gated: bool) -> Tensor:
    """levels uint8 [N, K] below 2^bits in panels: uint8 [packed size]."""
    assert builds.MODULE is not None
    levels = levels.contiguous()
    rows, inputs = levels.shape
    size, call = {
        8: (builds.MODULE.integer_size_8, builds.MODULE.pack_levels_8),
        4: (builds.MODULE.integer_size_4, builds.MODULE.pack_levels_4),
    }[bits]
    packed = memory.empty(size(rows, inputs, int(gated)), torch.uint8)
    call(levels.data_ptr(), packed.data_ptr(), rows, inputs, int(gated))
    return packed


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    inputs: int,
    eps: float,
    finish: int,
    norm: Tensor | None = None,
) -> None:
    """y [M, N] = or += x [M, inputs] · packed weight + bias, x's rows first divided by their root mean square, and
    multiplied by `norm` [inputs] float32, if `eps` is not NO_NORM; with one of GATES y [M, N / 2] = activation(first
    half) · second half."""
    assert builds.MODULE is not None
    _check(x, y, inputs)
    call = builds.MODULE.linear_bfloat16 if weight.dtype is torch.bfloat16 else builds.MODULE.linear_float32
    call(
        x.data_ptr(),
        x.stride(0),
        inputs,
        eps,
        0 if norm is None else norm.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        len(x),
        y.shape[1],
        finish,
    )


def integer_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    outliers: Tensor,
    outlier_weights: Tensor,
    bits: int,
    bias: Tensor | None,
    y: Tensor,
    inputs: int,
    eps: float,
    finish: int,
) -> None:
    """The same with a weight of `pack_levels`, scales [N, groups] packed by `pack`, outliers int64 and their weights
    [N, outliers] packed by `pack`; see `kernels.formats.quantised`."""
    assert builds.MODULE is not None
    _check(x, y, inputs)
    call = builds.MODULE.integer_4 if bits == 4 else builds.MODULE.integer_8
    call(
        x.data_ptr(),
        x.stride(0),
        inputs,
        eps,
        weight.data_ptr(),
        scales.data_ptr(),
        outliers.data_ptr(),
        len(outliers),
        outlier_weights.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        len(x),
        y.shape[1],
        finish,
    )


def _check(x: Tensor, y: Tensor, inputs: int) -> None:
    if x.stride(1) != 1 or x.shape[1] != inputs or x.dtype is not torch.float32 or not y.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a layer of {inputs} inputs in float32")


def _places(cache: Tensor) -> tuple[int, ...]:
    """Of a cache layer, in the order that kernels/cpu/module.cpp reads: address, tokens in a block, strides."""
    block, token, half, head, one = cache.stride()
    assert one == 1
    return (cache.data_ptr(), cache.shape[1], block, token, half, head)


def rotate_and_write(heads: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """Rotate queries and keys of heads [T, heads + 2 kv_heads, D] in place by cis (complex64 [T, 1, D/2]) and put
    keys and values into their slots of a cache layer."""
    assert builds.MODULE is not None and heads.is_contiguous() and cis.is_contiguous()
    kv_heads, dim = cache.shape[3], heads.shape[2]
    calls: dict[torch.dtype, Callable[..., None]] = {
        torch.float32: builds.MODULE.rotate_and_write_float32,
        torch.bfloat16: builds.MODULE.rotate_and_write_bfloat16,
        torch.int8: builds.MODULE.rotate_and_write_int8,
    }
    calls[cache.dtype](
        heads.data_ptr(),
        cis.data_ptr(),
        meta.num_tokens,
        heads.shape[1] - 2 * kv_heads,
        kv_heads,
        dim,
        *_places(cache),
        meta.write_slots.data_ptr(),
    )


def keeper(table: Tensor, column: int, width: int) -> Callable[[Tensor, Tensor, int], None]:
    """See `kernels.ops.keeper`: float32 rows into a bfloat16 table. All that stays is looked up here, once: behind a
    layer's weights every look-up more is one that the processor has forgotten (a Skylake core: 69 µs in all at first,
    5 µs at once again)."""
    assert builds.MODULE is not None and table.is_contiguous()
    call, stride = builds.MODULE.keep, table.shape[1]
    first = table.data_ptr() + column * table.itemsize

    def keep(states: Tensor, slots: Tensor, num: int, _alive: Tensor = table) -> None:
        call(states.data_ptr(), num, width, first, stride, slots.data_ptr())

    return keep


def automaton() -> type[SuffixAutomaton]:
    """A type that does the same."""
    assert builds.MODULE is not None
    found: type[SuffixAutomaton] = builds.MODULE.SuffixAutomaton
    return found


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """x, contiguous float32, becomes cap · tanh(x / cap) in place."""
    assert builds.MODULE is not None and x.is_contiguous() and x.dtype is torch.float32
    builds.MODULE.soft_cap(x.data_ptr(), x.numel(), cap)
    return x


def paged_attention(
    q: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.ops.paged_attention`. q [T or more, heads, D] with heads contiguous; padding rows become zero."""
    assert builds.MODULE is not None and q.stride(1) == q.shape[2] and q.stride(2) == 1
    kv_heads, dim = cache.shape[3], q.shape[2]
    make = torch.empty if len(q) == meta.num_tokens else torch.zeros
    out = make(len(q), q.shape[1] * dim)
    calls: dict[torch.dtype, Callable[..., None]] = {
        torch.float32: builds.MODULE.attention_float32,
        torch.bfloat16: builds.MODULE.attention_bfloat16,
        torch.int8: builds.MODULE.attention_int8,
    }
    calls[cache.dtype](
        q.data_ptr(),
        q.stride(0),
        *_places(cache),
        kv_heads,
        q.shape[1],
        dim,
        *meta.addresses,
        window or 0,
        scale,
        cap,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    return out


def layer(
    arguments: Sequence[float],
    h: Tensor,
    cis: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    kept: Tensor | None = None,
) -> None:
    """A decoder layer of `engine.models.layers.layer.Layer.arguments` over the first T rows of h, in place. `kept`,
    int64 and ascending: tokens whose rows are wanted behind it, which then come first. The rest as of
    `rotate_and_write` and `paged_attention`."""
    assert builds.MODULE is not None
    calls: dict[torch.dtype, Callable[..., None]] = {
        torch.float32: builds.MODULE.layer_float32,
        torch.bfloat16: builds.MODULE.layer_bfloat16,
        torch.int8: builds.MODULE.layer_int8,
    }
    calls[cache.dtype](
        *arguments,
        h.data_ptr(),
        cis.data_ptr(),
        meta.num_tokens,
        meta.write_slots.data_ptr(),
        *_places(cache),
        *meta.addresses,
        0 if kept is None else kept.data_ptr(),
        ALL_TOKENS if kept is None else len(kept),
    )
