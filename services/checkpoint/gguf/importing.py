"""Writes the Hugging Face folder of a GGUF file: safetensors, configuration, tokenizer and chat template.

The only part of this room that needs torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from sluice_server.engine.models.gguf.checkpoint import GgufCheckpoint
from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.engine.models.loading import plan_model
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.models.weights import INDEX
from sluice_server.services.checkpoint.gguf.configuration import make_configuration
from sluice_server.services.checkpoint.gguf.dumping import dump
from sluice_server.services.checkpoint.gguf.folder import shards_of

MAX_SHARD_BYTES = 4 << 30
CPU = torch.device("cpu")


def import_gguf(path: Path, folder: Path, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES) -> int:
    """Writes the folder of a GGUF file, with matrices and vectors in `dtype`; returns the number of parameters.

    Only the tensors of one shard are in memory at a time. Raises ServiceError for a file that cannot be served, OSError
    for a folder that cannot be written.
    """
    files = shards_of(path)
    configuration = make_configuration(read_header(files[0]), is_widened=True)
    configuration["config.json"]["torch_dtype"] = str(dtype).removeprefix("torch.")
    source = GgufCheckpoint(files, dtype, CPU)
    folder.mkdir(parents=True, exist_ok=True)
    dump(folder, configuration)
    shapes = plan_model(read_served(folder), dtype).shapes
    parts = list(_parts(shapes, dtype.itemsize, max_shard_bytes))
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        tensors = {one: source.get(one, shapes[one]).contiguous() for one in part}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(parts) > 1:
        where = {one: name for name, part in zip(names, parts, strict=True) for one in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2) + "\n")
    return source.num_parameters


def _parts(shapes: Mapping[str, tuple[int, ...]], itemsize: int, most: int) -> Iterator[list[str]]:
    """Yields names of tensors that together take at most so many bytes, or of one that takes more."""
    part: list[str] = []
    size = 0
    for name, shape in shapes.items():
        own = torch.Size(shape).numel() * itemsize
        if part and size + own > most:
            yield part
            part, size = [], 0
        part.append(name)
        size += own
    yield part
