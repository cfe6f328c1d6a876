"""The measured cases of kernels without attention: sampling, norms, rotation with the write of keys and values,
activation. Those of matrix products are in `benchmarks.gpu_products`.

A case makes its tensors when it is measured, on any device: tests run the same cases, small, in the interpreter.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.reference import attention, elementwise
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.triton import activation, kv_write, norm, sampling

EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all cases; the defaults are those of served models."""

    batches: tuple[int, ...] = (1, 256)
    vocab: int = 128_256
    tokens: tuple[int, ...] = (64, 8192)
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 32
    rows: tuple[int, ...] = (1, 16, 64, 4096)
    squares: tuple[int, ...] = (4096, 14_336)
    expert_tokens: tuple[int, ...] = (1, 64, 4096)
    experts: tuple[int, ...] = (64, 256)
    chosen: int = 8
    hidden: int = 2048
    inner: int = 768
    adapters: int = 8
    rank: int = 16


class CaseDevice(NamedTuple):
    """The device of tensors, and the number format of activations."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(self.dtype)


class Work(NamedTuple):
    """Attributes:
    ours, torch: the same, by our kernel and in torch's operators.
    num_bytes: that have to be read and written at least.
    check: what both give; None where each draws for itself.
    tolerance: by which they may differ, of the largest number.
    flops: of products, on numbers of `size` bytes.
    """

    ours: Callable[[], object]
    torch: Callable[[], object]
    num_bytes: int
    check: Callable[[], tuple[Tensor, Tensor]] | None
    tolerance: float = 0.02
    flops: int = 0
    size: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Attributes:
    part: of the benchmark that it belongs to.
    group: what is computed; cases of a group differ in `size`.
    """

    part: str
    group: str
    size: int
    make: Callable[[CaseDevice], Work]
    needs_fp8: bool = False

    @property
    def key(self) -> str:
        """The name of the case in results."""
        return f"{self.part}: {self.group}, {self.size}"


def pure(ours: Callable[[], Tensor], peer: Callable[[], Tensor], num_bytes: int, tolerance: float = 0.02) -> Work:
    """Work that changes none of its inputs."""
    return Work(ours, peer, num_bytes, lambda: (ours(), peer()), tolerance)


def disagreement(work: Work) -> float:
    """The difference of ours and torch's results, relative to torch's largest number; 0 where results are random."""
    if work.check is None:
        work.ours(), work.torch()
        return 0.0
    ours, theirs = (one.double() for one in work.check())
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()


def cases(sizes: Sizes) -> Iterator[Case]:
    """All cases of this file, part by part."""
    for batch, (name, truncation) in itertools.product(sizes.batches, TRUNCATIONS.items()):
        yield Case("sample", name, batch, partial(sample, batch=batch, vocab=sizes.vocab, truncation=truncation))
    for num in sizes.tokens:
        yield Case("norm", "rms_norm", num, partial(rms_norm, tokens=num, width=sizes.width))
        yield Case("norm", "add_rms_norm", num, partial(add_rms_norm, tokens=num, width=sizes.width))
        yield Case("silu", "silu_mul", num, partial(silu, tokens=num, width=sizes.width))
    for kept, num in itertools.product(("activations", "int8"), sizes.tokens):
        yield Case("write", f"rope and write as {kept}", num, partial(write, tokens=num, kept=kept, sizes=sizes))


# temperature, top-k, top-p
TRUNCATIONS = {"greedy": (0.0, 0, 1.0), "all": (0.8, 0, 1.0), "top-k 50, top-p 0.95": (0.8, 50, 0.95)}


def sample(at: CaseDevice, batch: int, vocab: int, truncation: tuple[float, int, float]) -> Work:
    """Samples a token of each of `batch` rows. Unlike ours, torch's draws depend on the batch."""
    temperature, top_k, top_p = truncation
    logits = torch.randn(batch, vocab, device=at.device) * 4

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=at.device)

    long, counts = torch.int64, torch.arange(batch, device=at.device)
    rows = Rows(
        filled(temperature), filled(top_k, long), filled(top_p), filled(0), filled(1), counts, counts, filled(0, long)
    )

    def ours() -> Tensor:
        return sampling.sample(logits, rows)[0]

    if temperature == 0.0:
        return pure(ours, lambda: logits.argmax(1), logits.nbytes, 0.0)
    return Work(ours, lambda: drawn(logits / temperature, top_k, top_p), logits.nbytes, None)


def drawn(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids [R] drawn from scaled logits, with truncation as torch users write it."""
    if not top_k and top_p == 1.0:
        weights = scaled.softmax(1)
        return weights.div_(torch.empty_like(weights).exponential_()).argmax(1)
    sorted_logits, ids = scaled.sort(dim=1, descending=True)
    if top_k:
        sorted_logits[:, top_k:] = -torch.inf
    weights = sorted_logits.softmax(1)
    weights = weights.masked_fill(weights.cumsum(1) - weights >= top_p, 0.0)
    places = weights.div_(torch.empty_like(weights).exponential_()).argmax(1, keepdim=True)
    return ids.gather(1, places)[:, 0]


def rms_norm(at: CaseDevice, tokens: int, width: int) -> Work:
    """The norm of activations."""
    x, weight = at.randn(tokens, width), at.randn(width)
    return pure(
        lambda: norm.rms_norm(x, weight, EPS),
        lambda: F.rms_norm(x, (width,), weight, EPS),
        2 * x.nbytes + weight.nbytes,
    )


def add_rms_norm(at: CaseDevice, tokens: int, width: int) -> Work:
    """The norm of the residual stream, in float32, after an addition to it."""
    x, weight = at.randn(tokens, width), at.randn(width)
    residual = torch.randn(tokens, width, device=at.device)
    other = residual.clone()

    def peer() -> Tensor:
        other.add_(x)
        return F.rms_norm(other, (width,), weight.float(), EPS).to(at.dtype)

    return pure(lambda: norm.add_rms_norm_(residual, x, weight, EPS), peer, 2 * x.nbytes + 2 * residual.nbytes)


def write(at: CaseDevice, tokens: int, kept: str, sizes: Sizes) -> Work:
    """Rotates queries and keys, and writes keys and values into a cache of the activations' format or of 8 bits."""
    dtype = torch.int8 if kept == "int8" else at.dtype
    width, keys = slots.slot_width(sizes.dim, dtype), sizes.kv_heads
    heads = at.randn(tokens, sizes.heads + 2 * keys, sizes.dim)
    other = heads.clone()
    angles = torch.rand(tokens, 1, sizes.dim // 2, device=at.device)
    cis = torch.polar(torch.ones_like(angles), angles)
    places = torch.randperm(-(-tokens // sizes.block) * sizes.block, device=at.device)[:tokens]

    def new(is_whole: bool) -> Tensor:
        num = -(-tokens // sizes.block)
        make = lambda shape: torch.zeros(shape, dtype=dtype, device=at.device)  # noqa: E731 # one of two arguments
        align = slots.GPU_ALIGN if is_whole else slots.SCALE_BYTES
        own = slots.slot_width(sizes.dim, dtype, align)
        return new_layers(num, 1, sizes.block, keys, own, make, is_whole=is_whole)[0]

    cache, plain = new(True), new(False)
    numbers, scales = slots.parts(cache, sizes.dim)

    def peer() -> None:
        elementwise.rope_(other[:, :-keys], cis)
        attention.write_kv(other[:, -2 * keys :].view(tokens, 2, keys, -1), plain, places)

    def ours() -> None:
        kv_write.rotate_and_write(heads, cis, numbers, places, scales)

    def check() -> tuple[Tensor, Tensor]:
        ours()
        peer()
        both = ((heads, cache), (other, plain))
        found = [
            torch.cat([one[:, : sizes.heads].flatten(), slots.decode(kv, sizes.dim, at.dtype).flatten()])
            for one, kv in both
        ]
        return found[0], found[1]

    written = tokens * 2 * keys * width * dtype.itemsize
    return Work(ours, peer, heads.nbytes + heads[:, : sizes.heads].nbytes + cis.nbytes + written, check)


def silu(at: CaseDevice, tokens: int, width: int) -> Work:
    """The activation between the halves of an MLP."""
    gate_up = at.randn(tokens, 2 * width)
    num_bytes = gate_up.nbytes + gate_up.nbytes // 2
    return pure(lambda: activation.silu_mul(gate_up), lambda: elementwise.silu_mul(gate_up), num_bytes)
