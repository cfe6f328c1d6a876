"""Other implementations of attention on one GPU: torch's SDPA and its backends, FlexAttention, FlashInfer,
and FlashAttention 3.

All but the last two get keys and values that are contiguous already, which ours are not. A peer that is not here, or
that fails, costs its own figure only and says why.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_command import Clock, Ground
from benchmarks.gpu_results import Row
from sluice_server.kernels.backends.fa3 import load as load_fa3
from sluice_server.kernels.backends.measured import AttentionSizes, made
from sluice_server.kernels.layout.ragged import AttentionOptions


class Problem(NamedTuple):
    """`batch` rows of `length` keys, of which the last `num` have queries q [batch * num, heads, dim]."""

    q: Tensor
    batch: int
    length: int
    num: int
    kv_heads: int
    block: int

    @property
    def queries(self) -> Tensor:
        """[batch, heads, num, dim]."""
        return self.q.view(self.batch, self.num, *self.q.shape[1:]).transpose(1, 2)


Call = Callable[[], object]


def figures(problem: Problem, ground: Ground, took: float, work: int = 0) -> Row:
    """The time of each peer, or the reason why there is none, and the ratio of ours (`took` seconds) to the fastest;
    with `work`, rates."""
    times, found = dict[str, float](), Row()
    for name, make in PEERS.items():
        try:
            times[name] = timed(make(problem, ground), ground.clock)
        except Exception as error:  # another's: ours is measured all the same
            found[f"{name}_missing"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    found |= {f"{name}_us": one * 1e6 for name, one in times.items()}
    if work:
        found |= {f"{name}_tflop_s": work / one / 1e12 for name, one in times.items()}
    if times:
        best = min(times, key=lambda name: times[name])
        found |= {"best": best, "over_best": times[best] / took}
    return found


def timed(call: Call, clock: Clock) -> float:
    """The time from a recorded graph, or from launches where no graph can hold the call."""
    try:
        return clock(call)
    except RuntimeError:
        return clock(call, is_recorded=False)


def keys_and_values(problem: Problem) -> tuple[Tensor, Tensor]:
    """Random keys and values, [batch, kv_heads, length, dim] each."""
    shape = problem.batch, problem.kv_heads, problem.length, problem.q.shape[2]
    k, v = (torch.randn(shape, device=problem.q.device, dtype=problem.q.dtype) for _ in range(2))
    return k, v


def sdpa(problem: Problem, ground: Ground, backend: SDPBackend | None = None) -> Call:
    """torch's SDPA, by the backend that it chooses, or by a given one."""
    q, (k, v), is_causal = problem.queries, keys_and_values(problem), problem.num > 1

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def by_backend() -> Tensor:
        assert backend is not None
        with sdpa_kernel([backend]):
            return call()

    return call if backend is None else by_backend


def flex(problem: Problem, ground: Ground) -> Call:
    """FlexAttention, causal by a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, (k, v), mask = problem.queries, keys_and_values(problem), None
    if problem.num > 1:
        size = problem.length
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=q.device.type)
    torch.compiler.reset()  # else a limit on compilations is reached, and what is measured is not compiled
    compiled = flex_attention if ground.is_dry else torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def flashinfer(problem: Problem, ground: Ground) -> Call:
    """FlashInfer's paged wrappers."""
    if importlib.util.find_spec("flashinfer") is None:
        raise RuntimeError("not installed")
    import flashinfer as peer

    q, batch, device = problem.q, problem.batch, problem.q.device
    heads, dim, width = q.shape[1], q.shape[2], -(-problem.length // problem.block)
    cache = torch.randn(batch * width, 2, problem.block, problem.kv_heads, dim, device=device, dtype=q.dtype)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    pointers = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
    indices = torch.randperm(batch * width, device=device).int()
    last = torch.full((batch,), (problem.length - 1) % problem.block + 1, dtype=torch.int32, device=device)
    sizes = heads, problem.kv_heads, dim, problem.block
    if problem.num == 1:
        wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(space, use_tensor_cores=True)
        wrapper.plan(pointers, indices, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
    else:
        wrapper = peer.BatchPrefillWithPagedKVCacheWrapper(space)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * problem.num
        wrapper.plan(starts, pointers, indices, last, *sizes, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    return lambda: wrapper.run(q, cache)


def fa3(problem: Problem, ground: Ground) -> Call:
    """FlashAttention 3 as `--attention-backend fa3` calls it, over a cache in our layout."""
    q, device = problem.q, problem.q.device
    options = AttentionOptions(q.shape[2] ** -0.5)
    shape = q.shape[1], problem.kv_heads, q.shape[2], problem.block, q.dtype, device, options
    sizes = AttentionSizes(*shape, problem.batch, problem.batch * problem.num, problem.length)
    _, cache, rows = made([problem.num] * problem.batch, [problem.length] * problem.batch, sizes)
    library = load_fa3(device)
    return lambda: library.attend(q, cache, rows, options, None)


PEERS: dict[str, Callable[[Problem, Ground], Call]] = {
    "sdpa": sdpa,
    "flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "flashinfer": flashinfer,
    "fa3": fa3,
}
