"""Our own CPU kernels (kernels/cpu, C++), as functions of tensors: float32, contiguous where it is said.

Built with the package, once for each instruction set; the best that this machine can run is taken. Without a compiler
at installation, or on another machine, there are none: `is_available` says so and torch's operators serve instead.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata

NO_NORM = -1.0
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product; as in kernels/cpu/linear.h
LANES = 16  # head sizes must be multiples of it
MAX_HEAD_DIM = 256
BY_CAPABILITY = {"AVX512": ("v4", "v3"), "AVX2": ("v3",)}  # what torch calls the machine's best → modules, best first


def load(name: str) -> ModuleType | None:
    """The kernels built for the instruction set `name`; None if the package was installed without them."""
    try:
        return importlib.import_module(f"kernels.cpu.{name}")
    except ImportError:
        return None


def runnable() -> tuple[str, ...]:
    """Instruction sets of this machine that there may be kernels for, best first."""
    return BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ())


MODULE = next(filter(None, map(load, runnable())), None)


def is_available() -> bool:
    """Whether there are kernels for this machine."""
    return MODULE is not None


def instruction_set() -> str:
    """What the kernels in use were built for, or "none"."""
    return MODULE.__name__.rpartition(".")[2] if MODULE else "none"


def set_threads(num: int) -> None:
    """Threads that compute, the caller's among them."""
    if MODULE is not None:
        MODULE.set_threads(num)


def takes(cache: Tensor) -> bool:
    """Whether attention over a cache layer [num_blocks, block_size, 2, kv_heads, D] may run here."""
    dim = cache.shape[-1]
    return (
        MODULE is not None
        and cache.dtype is torch.float32
        and cache.device.type == "cpu"
        and dim % LANES == 0
        and dim <= MAX_HEAD_DIM
    )


def pack(weight: Tensor, gated: bool) -> Tensor:
    """weight [N, K] in panels: float32 [packed size]. Gated: row i of the first half beside row i of the second."""
    assert MODULE is not None
    weight = weight.contiguous()
    rows, inputs = weight.shape
    packed = torch.empty(MODULE.packed_size(rows, inputs, int(gated)))
    MODULE.pack(weight.data_ptr(), packed.data_ptr(), rows, inputs, int(gated))
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, inputs: int, eps: float, finish: int) -> None:
    """y [M, N] = or += x [M, inputs] · packed weight + bias, x's rows first divided by their root mean square if
    `eps` is not NO_NORM; with GATE y [M, N / 2] = silu(first half) · second half."""
    assert MODULE is not None
    if x.stride(1) != 1 or x.shape[1] != inputs or x.dtype is not torch.float32 or not y.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a layer of {inputs} inputs in float32")
    MODULE.linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        len(x),
        y.shape[1],
        inputs,
        eps,
        finish,
    )


def rotate_and_write(heads: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """Rotate queries and keys of heads [T, heads + 2 kv_heads, D] in place by cis (complex64 [T, 1, D/2]) and put
    keys and values into their slots of a cache layer."""
    assert MODULE is not None and heads.is_contiguous() and cis.is_contiguous()
    kv_heads, dim = cache.shape[3:]
    MODULE.rotate_and_write(
        heads.data_ptr(),
        cis.data_ptr(),
        meta.num_tokens,
        heads.shape[1] - 2 * kv_heads,
        kv_heads,
        dim,
        cache.data_ptr(),
        meta.write_slots.data_ptr(),
    )


def paged_attention(q: Tensor, cache: Tensor, meta: AttentionMetadata, scale: float, window: int | None) -> Tensor:
    """See `kernels.ops.paged_attention`. q [T or more, heads, D] with heads contiguous; padding rows become zero."""
    assert MODULE is not None and q.stride(1) == q.shape[2] and q.stride(2) == 1
    _, block_size, _, kv_heads, dim = cache.shape
    make = torch.empty if len(q) == meta.num_tokens else torch.zeros
    out = make(len(q), q.shape[1] * dim)
    tables, width, firsts, counts, contexts, rows = meta.addresses
    MODULE.attention(
        q.data_ptr(),
        q.stride(0),
        cache.data_ptr(),
        block_size,
        kv_heads,
        q.shape[1],
        dim,
        tables,
        width,
        firsts,
        counts,
        contexts,
        rows,
        window or 0,
        scale,
        out.data_ptr(),
    )
    return out
