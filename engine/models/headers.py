"""The shapes of a checkpoint's tensors, from the headers of its safetensors files: no tensor is read."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.models.fields import MENDING, invalid_model
from sluice_server.engine.models.weights import known_name, weight_files

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 << 20  # as safetensors itself bounds it
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def read_shapes(directory: Path) -> Shapes:
    """Returns the shape of each tensor by its name. Raises ServiceError for a file that is no safetensors file."""
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        try:
            with path.open("rb") as file:
                (size,) = LENGTH.unpack(file.read(LENGTH.size))
                header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
            shapes = {known_name(name): tuple(map(int, one["shape"])) for name, one in _tensors(header)}
        except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid_model(path, f"is corrupt or cut short ({error}): {MENDING}") from error
        found.update(shapes)
    return found


def _tensors(header: Mapping[str, Mapping[str, list[int]]]) -> list[tuple[str, Mapping[str, list[int]]]]:
    return [(name, one) for name, one in header.items() if name != "__metadata__"]
