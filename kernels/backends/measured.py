"""Measures a library for attention beside our kernels, on a model's shapes and the cache's layout.

Takes shapes and what measures a call; allocates a cache of its own for each case, which is gone afterwards.
"""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sluice_server.kernels.backends.interface import OURS, AttentionBackend, StepKind
from sluice_server.kernels.formats.library_product import GAIN, TOLERANCE, device_seconds
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of a measured cache
MOST_KEYS = 4096  # of a measured row
MOST_ROWS = 32
MOST_PROMPT = 2048
MOST_LOST = 1.15  # of our kernels' time, that a library which is faster elsewhere may take

Seconds = Callable[[Callable[[], object], bool], float]  # of a call, and whether it is to be recorded first


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What a layer of the model attends with, and the steps that the engine computes at most.

    Attributes:
        max_rows, max_tokens: of a step.
        max_keys: of a row.
    """

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    options: AttentionOptions
    max_rows: int
    max_tokens: int
    max_keys: int


def shares(library: AttentionBackend, kind: StepKind, sizes: AttentionSizes, seconds: Seconds) -> list[float] | str:
    """Returns the library's time as a share of our kernels', for some steps of a kind.

    Returns the reason, for people, if it fails or gives other numbers.
    """
    found = []
    for counts, contexts in steps(kind, sizes):
        try:
            q, cache, meta = made(counts, contexts, sizes)
            calls = [partial(one.attend, q, cache, meta, sizes.options, None) for one in (OURS, library)]
            own, other = (call().float() for call in calls)
            if bool(((own - other).abs().amax() > TOLERANCE * own.abs().amax()).item()):
                return "it gives other numbers"
            ours, theirs = (seconds(call, library.supported.is_recorded) for call in calls)
        except RuntimeError as error:  # this GPU or version has none, or memory is short
            logger.info("attention by %s fails", library.name, exc_info=error)
            return f"it fails: {error}".splitlines()[0]
        found.append(theirs / ours)
    return found


def is_faster(found: list[float] | str) -> bool:
    """Returns whether a library is clearly faster over the steps measured, and much slower in none."""
    return not isinstance(found, str) and typical(found) < GAIN and max(found) < MOST_LOST


def steps(kind: StepKind, sizes: AttentionSizes) -> Iterator[tuple[list[int], list[int]]]:
    """Returns the tokens and the keys of each row of the measured steps."""
    each = 2 * sizes.kv_heads * sizes.dim * sizes.dtype.itemsize
    most = max(1, MOST_BYTES // each)
    if kind is StepKind.PREFILL:
        num = min(MOST_PROMPT, sizes.max_tokens, sizes.max_keys, most)
        return iter([([num], [num]), ([num // 4] * 4, [num // 4] * 4)] if num >= 4 * MOST_ROWS else [([num], [num])])
    keys = min(MOST_KEYS, sizes.max_keys, most)
    rows = max(1, min(MOST_ROWS, sizes.max_rows, most // keys))
    return iter([([1] * num, [keys] * num) for num in dict.fromkeys((1, rows))])


def made(counts: list[int], contexts: list[int], sizes: AttentionSizes) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Returns queries, a cache with random contents in which rows own blocks in random order, and the rows."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    width = -(-max(contexts) // sizes.block_size)
    order = np.random.default_rng(0).permutation(len(counts) * width).astype(np.int32).reshape(len(counts), width)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=sizes.dtype, device=sizes.device)

    layers = new_layers(order.size, 2, sizes.block_size, sizes.kv_heads, sizes.dim, numbers, is_whole=True)
    q = numbers((sum(counts), sizes.heads + 2 * sizes.kv_heads, sizes.dim))[:, : sizes.heads]
    return q, layers[0], AttentionMetadata.build(counts, contexts, order, sizes.block_size, sizes.device)


def seconds_on_device(call: Callable[[], object], is_recorded: bool) -> float:
    """Returns the seconds that a call takes on the current CUDA device, recorded in a graph or launched."""
    if not is_recorded:
        return device_seconds(call)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return device_seconds(graph.replay)


def typical(found: list[float]) -> float:
    """Returns the geometric mean of shares."""
    return statistics.geometric_mean(found)
