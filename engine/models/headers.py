"""The shapes of a checkpoint's tensors, from the headers of its safetensors files: no tensor is read."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from sluice_server.engine.models.fields import MENDING, invalid_model, unreadable
from sluice_server.engine.models.weights import known_name, weight_files

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 << 20  # as safetensors itself bounds it
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class StoredTensor(NamedTuple):
    """What a header says of a tensor; `size` is its bytes in the file."""

    shape: tuple[int, ...]
    size: int


def read_shapes(directory: Path) -> Shapes:
    """Returns the shape of each tensor by its name. Raises ServiceError for a file that is no safetensors file."""
    return {name: one.shape for name, one in read_tensors(directory).items()}


def read_tensors(directory: Path) -> Mapping[str, StoredTensor]:
    """Returns what headers say of each tensor by its name. Raises like `read_shapes`."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        try:
            with path.open("rb") as file:
                (size,) = LENGTH.unpack(file.read(LENGTH.size))
                header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
            tensors = {known_name(name): _stored(one) for name, one in _tensors(header)}
        except OSError as error:
            raise unreadable(path, error) from error
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid_model(path, f"is corrupt or cut short ({error}): {MENDING}") from error
        found.update(tensors)
    return found


def _stored(one: Mapping[str, list[int]]) -> StoredTensor:
    first, end = one["data_offsets"]
    return StoredTensor(tuple(map(int, one["shape"])), int(end) - int(first))


def _tensors(header: Mapping[str, Mapping[str, list[int]]]) -> list[tuple[str, Mapping[str, list[int]]]]:
    return [(name, one) for name, one in header.items() if name != "__metadata__"]
