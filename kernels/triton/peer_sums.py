"""Adds up partial sums that lie in the memory of several CUDA devices; reference implementation in
`kernels.reference.peer_sums`.

One launch reads all of them, each where its rank has written it. It is an ordinary launch, that begins when the kernel
before it has ended: that one is the barrier behind which the other ranks' numbers are there.
"""

import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.peer_sums import PeerBuffers
from sluice_server.kernels.triton.aot import AotCase

BLOCK = 512  # numbers of one program: one load of four for each thread and part, as a decode step has few numbers
WARPS = 4
ALIGNED = tl.constexpr(16)  # bytes, of what the ranks' buffers begin at


def add_parts_(into: Tensor, buffers: PeerBuffers, parts: int) -> None:
    """See `kernels.reference.peer_sums.add_parts_`."""
    num = into.numel()
    if num:
        ranks = len(buffers.each)
        add_parts_kernel[triton.cdiv(num, BLOCK),](
            into, buffers.addresses, num, RANKS=ranks, PARTS=parts, BLOCK=BLOCK, num_warps=WARPS
        )


@triton.jit
def add_parts_kernel(
    into_ptr,  # float32 [num]
    addresses_ptr,  # int64 [RANKS]: of float32 [PARTS, num] each
    num,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds BLOCK numbers of all parts of all ranks, in this order, and then what is in `into`. Grid: ⌈num / BLOCK⌉."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    total = tl.load(_buffer(addresses_ptr, 0) + at, mask=mask, other=0.0)
    for other in tl.static_range(1, RANKS * PARTS):
        part = _buffer(addresses_ptr, other // PARTS) + (other % PARTS) * num
        total += tl.load(part + at, mask=mask, other=0.0)
    tl.store(into_ptr + at, tl.load(into_ptr + at, mask=mask, other=0.0) + total, mask=mask)


@triton.jit
def _buffer(addresses_ptr, rank):
    """Returns where a rank's buffer begins."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.float32)), ALIGNED)


def _case(ranks: int, parts: int, is_quick: bool = False) -> AotCase:
    types = {"into_ptr": "*fp32", "addresses_ptr": "*i64", "num": "i32"}
    constants = {"RANKS": ranks, "PARTS": parts, "BLOCK": BLOCK}
    name, vectors = f"peer_sums/{ranks} ranks, {parts} parts", frozenset({"loads", "stores"})
    return AotCase(name, add_parts_kernel, types, constants, vectors=vectors, is_quick=is_quick)


CASES = (_case(2, 1, is_quick=True), _case(4, 1), _case(8, 1), _case(2, 2), _case(2, 4))
