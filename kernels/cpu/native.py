"""Calls the C++ kernels (kernels/cpu) with tensors.

Activations are float32, contiguous where a function says so; weights and cache are in the formats that a function
names. `kernels.cpu.builds` chooses the build.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds, memory
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference.adjust import NO_MASK, TokenMask
from sluice_server.kernels.reference.automaton import SuffixAutomaton

NO_NORM = -1.0
STORE, ADD = 0, 1  # whether a product is stored or added; as in kernels/cpu/panels.h
GATES = {"silu": 2, "gelu_tanh": 3, "clamped": 4}  # values of `finish` for gated products, by activation
# Formats of a weight; as in kernels/cpu/layer.h. Affine: with a minimum for each group of inputs.
FLOAT32, BFLOAT16, INT8, INT8_AFFINE, INT4, INT4_AFFINE = range(6)
LANES = 16  # head sizes must be multiples of this
MAX_HEAD_DIM = 256
SCALE_BYTES = 4  # of the float32 scale behind the levels of one head's key or value in an 8-bit cache


def takes(q: Tensor, cache: Tensor) -> bool:
    """Returns whether attention of q [.., D] over a cache layer can run here: q is float32 and `attends` holds."""
    return builds.MODULE is not None and q.dtype is torch.float32 and attends(q.shape[-1], cache)


def attends(dim: int, cache: Tensor) -> bool:
    """Returns whether kernels support heads of size `dim` over a cache layer of float32, bfloat16 or int8."""
    return cache.dtype in (torch.float32, torch.bfloat16, torch.int8) and cache.is_cpu and has_heads_of(dim)


def has_heads_of(dim: int) -> bool:
    """Returns whether the attention kernels support heads of size `dim`."""
    return dim % LANES == 0 and dim <= MAX_HEAD_DIM


def pack(weight: Tensor, gated: bool) -> Tensor:
    """Packs weight [N, K], float32 or bfloat16, in panels: [packed size].

    If `gated`, row i of the first half is stored next to row i of the second half.
    """
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


def gated_width(features: int) -> int:
    """Returns the columns that panels of a gated weight with `features` rows have, padding included."""
    assert builds.MODULE is not None
    width: int = builds.MODULE.packed_size_float32(features, 1, 1)
    return width


def halves(panels: Tensor, features: int) -> Tensor:
    """Returns the columns of a gated weight's panels [M, gated_width] in the order of its rows: [M, features]."""
    panel = gated_width(2)
    by_half = panels.view(len(panels), -1, 2, panel // 2).transpose(1, 2).flatten(2)
    return by_half[:, :, : features // 2].flatten(1)


def integer_format(bits: int, has_minima: bool) -> int:
    """Returns the format of a quantised weight, see `kernels.formats.quantised`."""
    return {(8, False): INT8, (8, True): INT8_AFFINE, (4, False): INT4, (4, True): INT4_AFFINE}[bits, has_minima]


def pack_integers(levels: Tensor, scales: Tensor, minima: Tensor | None, form: int, gated: bool) -> Tensor:
    """Packs a quantised weight in panels, levels and what belongs to them side by side: uint8 [packed size].

    Levels are uint8 [N, K] below 2^bits; scales and minima float16 [N, ⌈K / 32⌉].
    """
    assert builds.MODULE is not None
    (rows, inputs), module = levels.shape, builds.MODULE
    size, call = {
        INT8: (module.packed_size_int8, module.pack_int8),
        INT8_AFFINE: (module.packed_size_int8_affine, module.pack_int8_affine),
        INT4: (module.packed_size_int4, module.pack_int4),
        INT4_AFFINE: (module.packed_size_int4_affine, module.pack_int4_affine),
    }[form]
    levels, scales = levels.contiguous(), scales.contiguous()
    minima = None if minima is None else minima.contiguous()
    packed = memory.empty(size(rows, inputs, int(gated)), torch.uint8)
    low = 0 if minima is None else minima.data_ptr()
    call(levels.data_ptr(), scales.data_ptr(), low, packed.data_ptr(), rows, inputs, int(gated))
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
    wanted: TokenMask | None = None,
) -> None:
    """Computes y [M, N] = or += x [M, inputs] · packed weight + bias, as `finish` says.

    If `eps` is not NO_NORM, x's rows are first divided by their root mean square and multiplied by `norm` [inputs]
    float32, if it is given. If `finish` is one of GATES, y [M, N / 2] = activation(first half) · second half.
    `wanted`: of the rows that it lists, only these columns are wanted, and others may stay as they are in y. Raises
    ValueError for an x or a `wanted` that does not fit.
    """
    assert builds.MODULE is not None
    call = builds.MODULE.linear_bfloat16 if weight.dtype is torch.bfloat16 else builds.MODULE.linear_float32
    _multiply(call, (x, norm, inputs, eps), weight, bias, (y, finish, wanted))


def integer_linear(
    x: Tensor,
    weight: Tensor,
    form: int,
    bias: Tensor | None,
    y: Tensor,
    inputs: int,
    eps: float,
    finish: int,
    norm: Tensor | None = None,
    wanted: TokenMask | None = None,
) -> None:
    """Computes the same as `linear` with a weight from `pack_integers` of the format `form`."""
    assert builds.MODULE is not None
    module = builds.MODULE
    call = {
        INT8: module.linear_int8,
        INT8_AFFINE: module.linear_int8_affine,
        INT4: module.linear_int4,
        INT4_AFFINE: module.linear_int4_affine,
    }[form]
    _multiply(call, (x, norm, inputs, eps), weight, bias, (y, finish, wanted))


def _multiply(
    call: Callable[..., None],
    rows: tuple[Tensor, Tensor | None, int, float],
    weight: Tensor,
    bias: Tensor | None,
    to: tuple[Tensor, int, TokenMask | None],
) -> None:
    """Calls a module's `linear_…` on `rows` (x, its norm, the weight's inputs, eps), writing `to` (y, finish, what is
    wanted of it)."""
    (x, norm, inputs, eps), (y, finish, wanted) = rows, to
    _check(x, y, inputs)
    if wanted is not None:
        _check_wanted(wanted, y, finish)
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
        *(NO_MASK if wanted is None else wanted.addresses),
    )


def _check(x: Tensor, y: Tensor, inputs: int) -> None:
    if x.stride(1) != 1 or x.shape[1] != inputs or x.dtype is not torch.float32 or not y.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a layer of {inputs} inputs in float32")


def _check_wanted(wanted: TokenMask, y: Tensor, finish: int) -> None:
    rows, bits = wanted
    fits = finish == STORE and bits.is_contiguous() and len(bits) == len(rows) and 32 * bits.shape[1] >= y.shape[1]
    if not fits or (len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(y)):
        raise ValueError(f"columns {tuple(bits.shape)} of {len(rows)} rows do not fit a result {tuple(y.shape)}")


def places(cache: Tensor) -> tuple[int, ...]:
    """Returns a cache layer's address, tokens in a block and strides, in the order of kernels/cpu/module.cpp."""
    block, token, half, head, one = cache.stride()
    assert one == 1
    return (cache.data_ptr(), cache.shape[1], block, token, half, head)


def rotate_and_write(heads: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """Rotates queries and keys in place, and writes keys and values into their slots of a cache layer.

    `heads` is [T, heads + 2 kv_heads, D] and `cis` complex64 [T, 1, D/2], both contiguous.
    """
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
        *places(cache),
        meta.write_slots.data_ptr(),
    )


def keeper(table: Tensor, column: int, width: int) -> Callable[[Tensor, Tensor, int], None]:
    """Returns a function that writes float32 rows into a bfloat16 table; see `kernels.ops.keeper`.

    Everything constant is looked up once, here. After a layer's weights have passed through the caches, each further
    lookup misses (a Skylake core: 69 µs in all for the first call, 5 µs if repeated immediately).
    """
    assert builds.MODULE is not None and table.is_contiguous()
    call, stride = builds.MODULE.keep, table.shape[1]
    first = table.data_ptr() + column * table.itemsize

    def keep(states: Tensor, slots: Tensor, num: int, _alive: Tensor = table) -> None:
        call(states.data_ptr(), num, width, first, stride, slots.data_ptr())

    return keep


def automaton() -> type[SuffixAutomaton]:
    """Returns the C++ class with the interface of `SuffixAutomaton`."""
    assert builds.MODULE is not None
    found: type[SuffixAutomaton] = builds.MODULE.SuffixAutomaton
    return found


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replaces x, contiguous float32, by cap · tanh(x / cap) in place."""
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
    """Computes attention over the paged cache; see `kernels.ops.paged_attention`. The heads of q must be contiguous."""
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
        *places(cache),
        kv_heads,
        q.shape[1],
        dim,
        *meta.addresses,
        window or 0,
        scale,
        cap,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *meta.last_address,
    )
    return out


def experts_into(arguments: Sequence[float], eps: float, h: Tensor, to: Tensor, held: range) -> None:
    """Computes to [T, hidden] += the weighted sum of the results of each row's experts; `to` may be h [T, hidden].

    Only experts that are `held` are computed. `arguments` are those of
    `engine.models.layers.experts.NativeExperts.arguments`. Raises ValueError for an h or `to` that does not fit.
    """
    assert builds.MODULE is not None
    for one in (h, to):
        _check(one, one, int(arguments[3]))
    if h.shape != to.shape:
        raise ValueError(f"experts of {tuple(h.shape)} cannot be added to {tuple(to.shape)}")
    numbers = (len(h), held.start, len(held))
    builds.MODULE.experts_into(*arguments, eps, h.data_ptr(), to.data_ptr(), *numbers)
