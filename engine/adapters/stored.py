"""The tensors of a safetensors file that is in memory, as views of it.

The safetensors package copies all tensors in one call, and has Python's interpreter all that time.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.models.fields import shown

LENGTH = struct.Struct("<Q")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tensors_of(content: memoryview, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file `name` in the order of its bytes. Raises ServiceError if its header lies, and for
    other dtypes. The whole header is read before the first is yielded."""
    try:
        (size,) = LENGTH.unpack(content[: LENGTH.size])
        header = _header(content[LENGTH.size : LENGTH.size + size], size)
        data = content[LENGTH.size + size :]
        described = sorted(((tensor, _described(about)) for tensor, about in header.items()), key=lambda one: one[1][2])
        ends = [0, *(end for _, (_, _, _, end) in described)]
        if [first for _, (_, _, first, _) in described] != ends[:-1] or ends[-1] != len(data):
            raise ValueError("tensors do not follow each other from the first byte to the last")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{name} is corrupt or cut short ({len(content)} bytes): save the adapter again"
        raise invalid_adapter(text) from error
    for tensor, (stored, shape, first, end) in described:
        dtype = DTYPES.get(stored)
        if dtype is None:
            raise invalid_adapter(f"{name}: tensor {shown(tensor)} is {stored}; supported are {', '.join(DTYPES)}")
        if end - first != math.prod(shape) * dtype.itemsize:
            raise invalid_adapter(f"{name} is corrupt: tensor {shown(tensor)} has {end - first} bytes")
        yield tensor, _view(data[first:end], dtype).view(shape)


def _header(text: memoryview, size: int) -> dict[str, Any]:
    if len(text) != size:
        raise ValueError("the header is longer than the file")
    header = json.loads(bytes(text))
    header.pop("__metadata__", None)
    found: dict[str, Any] = header
    return found


def _described(about: dict[str, Any]) -> tuple[str, list[int], int, int]:
    """Returns the dtype, shape, first byte and end of a tensor. Raises ValueError or TypeError for what is none."""
    shape, (first, end) = about["shape"], about["data_offsets"]
    if not all(type(one) is int and one >= 0 for one in (*shape, first, end)):
        raise ValueError("shapes and offsets are whole numbers")
    return str(about["dtype"]), list(shape), first, end


def _view(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a tensor; a copy of those that begin where none of the dtype may."""
    if not len(data):
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return (flat.clone() if flat.data_ptr() % dtype.itemsize else flat).view(dtype)
