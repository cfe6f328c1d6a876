"""Plans the memory of an engine from its settings and its checkpoint's headers: no weight is read.

What is planned is what the engine may come to take of the host: it holds less until its cache was used. On a GPU
weights and cache are on the device, where `--gpu-memory-utilization` bounds them.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.gguf.checkpoint import gguf_files
from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.engine.models.headers import read_shapes, read_tensors
from sluice_server.engine.models.model import token_bytes
from sluice_server.engine.models.offload.choice import OffloadedLayers, choose_layers
from sluice_server.engine.models.weights import weight_files
from sluice_server.engine.parallel.sharded import LAYERS
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.startup.allocation import CPU_CACHE_SHARE, cache_blocks
from sluice_server.engine.worker.startup.device_support import choose_device
from sluice_server.engine.worker.startup.formats import Formats, choose_formats
from sluice_server.kernels.layout.slots import SCALE_BYTES

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MOST_DIGITS = 10  # of a layer's number
WIDE = 4  # bytes of an activation
PROCESS_BYTES = 168 << 20  # an engine's code, torch and its threads: 160 once it has started, 250 for a moment before
GPU_PROCESS_BYTES = 2 << 30  # with the device's context, and what weights are read through
# Bytes of a number that is rounded, with its share of a scale (float16 scale and minimum of 32 numbers in 4 bits, one
# float32 for a row in 8); the head is more precise.
ROUNDED = {"int4": 0.5 + 4 / 32, "int8": 1.01, "w8a8": 1.01, "fp8": 1.01}
ROUNDED_HEAD = {"int4": 1.01, "int8": 1.01, "w8a8": 1.01, "fp8": 1.01}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Bytes of host memory that an engine may take.

    Attributes:
        weights: of the model, its draft model and its vision tower; without those that are offloaded to a file, and
            of a GPU those that are offloaded to the host.
        cache: of keys and values at the largest size.
        workspace: the process, and the largest step.
        tiers: cache blocks in host memory, adapters, rows of images.
        cache_tokens: the size of the cache at the start; 0 where the engine has none, or has it on a GPU.
    """

    weights: int
    cache: int
    workspace: int
    tiers: int
    cache_tokens: int


def plan_memory(
    config: EngineConfig, served: tuple[ModelConfig, Path], limits: Limits, draft: Path | None, budget: int
) -> PlannedMemory:
    """Returns what an engine of the model `served`, in this directory, may take. `draft`: the directory of its draft
    model or head. A cache that sizes itself takes its share of `budget` bytes at most. Raises ServiceError."""
    device = choose_device("cpu" if served[0].encoder is not None else config.device)
    config = config.sized(device.type)
    model, directory = served
    formats = choose_formats(config, device)
    tiers = config.host_cache_bytes + config.shared_cache_bytes
    tiers += config.adapter_host_bytes if config.max_adapters else 0
    tiers += config.encoder_cache_bytes if limits.images is not None else 0
    offloaded = offloaded_layers(config, directory, model, formats) if model.encoder is None else OffloadedLayers()
    if device.type != "cpu":
        return PlannedMemory(offloaded.size, 0, GPU_PROCESS_BYTES, tiers, 0)
    weights = weight_bytes(directory, model, formats) - offloaded.saved
    if draft is not None:
        weights += weight_bytes(draft, model, formats)
    workspace = config.num_ranks * PROCESS_BYTES + step_bytes(config, model)
    if model.encoder is not None:
        return PlannedMemory(weights, 0, workspace, tiers, 0)
    size = token_bytes(model, formats.cache, SCALE_BYTES)
    tokens = config.kv_cache_tokens or _own_size(config, size, limits, budget)
    return PlannedMemory(weights, max(tokens, config.kv_cache_max_tokens) * size, workspace, tiers, tokens)


def weight_bytes(directory: Path, model: ModelConfig, formats: Formats) -> int:
    """Returns the bytes of a checkpoint's weights in memory. Those that came quantised stay so; a GGUF file's
    embeddings are widened."""
    wide = formats.dtype.itemsize
    files = gguf_files(directory)
    if files or model.stored is not None:
        read = sum(path.stat().st_size for path in files or weight_files(directory))
        return read + (model.vocab_size * model.hidden_size * wide if files else 0)
    shapes = read_shapes(directory)
    body, head = ROUNDED.get(formats.weights, wide), ROUNDED_HEAD.get(formats.weights, wide)
    total = 0.0
    for name, shape in shapes.items():
        total += math.prod(shape) * (head if name == HEAD else body if _is_matrix(name, shape) else wide)
    if HEAD not in shapes and model.encoder is None:  # it is tied: a packed copy of the embeddings
        total += math.prod(shapes.get(EMBEDDINGS, ())) * head
    return int(total)


def layer_bytes(directory: Path, model: ModelConfig, formats: Formats) -> list[int]:
    """Returns the bytes of each layer's matrices in memory, as `weight_bytes`."""
    found = [0.0] * model.num_layers
    for layer, size in _matrices(directory, model, formats):
        if layer < len(found):  # else loading refuses the file
            found[layer] += size
    return [int(size) for size in found]


def offloaded_layers(config: EngineConfig, directory: Path, model: ModelConfig, formats: Formats) -> OffloadedLayers:
    """Returns the layers whose weights are to be offloaded. Raises ServiceError for bytes that cannot be."""
    if not config.weights_offload_bytes:
        return OffloadedLayers()
    return choose_layers(layer_bytes(directory, model, formats), config.weights_offload_bytes)


def _matrices(directory: Path, model: ModelConfig, formats: Formats) -> Iterator[tuple[int, float]]:
    """Yields the layer and the bytes of each matrix of a layer."""
    files = gguf_files(directory)
    for path in files:
        for name, info in read_header(path).tensors.items():
            if len(info.shape) > 1 and (layer := _layer_of(name, "blk.")) is not None:
                yield layer, info.size
    if files:
        return
    each = ROUNDED.get(formats.weights, formats.dtype.itemsize)
    for name, (shape, size) in read_tensors(directory).items():
        layer = _layer_of(name, LAYERS)
        if layer is not None and len(shape) > 1:
            yield layer, size if model.stored is not None else math.prod(shape) * each


def _layer_of(name: str, before: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to; None for one of none."""
    number = name.removeprefix(before).split(".", 1)[0] if name.startswith(before) else ""
    return int(number) if number.isdecimal() and len(number) < MOST_DIGITS else None


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and name.startswith(LAYERS)


def step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the bytes that the largest step takes beside weights and cache: activations of one layer, logits, and
    the table of rotations."""
    width = 4 * model.hidden_size + 3 * model.intermediate_size
    width += (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    logits = 2 * config.max_num_seqs * model.vocab_size
    return WIDE * (config.max_num_batched_tokens * width + logits + model.context_length * model.head_dim)


def _own_size(config: EngineConfig, size: int, limits: Limits, budget: int) -> int:
    """Returns the tokens of a cache that sizes itself, as the engine would, and by the budget."""
    tokens = cache_blocks(config, size, limits, None) * config.block_size
    share = int(budget * CPU_CACHE_SHARE) // size // config.block_size * config.block_size
    return max(config.block_size, min(tokens, share))
