"""Tensors of a safetensors file in memory: the same as those of the package, and nothing of a header that lies."""

import json
import struct
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from safetensors.torch import save

from sluice_server.engine.adapters.stored import tensors_of
from sluice_server.engine.errors import ServiceError

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.arange(10, dtype=torch.float32).view(2, 5),
    "half": torch.ones(4, 1, dtype=torch.float16),
    "none": torch.empty(0, 7),
}


def read(content: bytes) -> dict[str, torch.Tensor]:
    return dict(tensors_of(memoryview(bytearray(content)), "file"))


def stored(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def about(first: int, end: int, shape: Iterable[object] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}


def test_what_the_package_writes_is_read() -> None:
    found = read(save(TENSORS, {"format": "pt"}))
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_tensors_are_views_of_the_file() -> None:
    """A copy of all of them in one call keeps Python's interpreter from the thread of the steps."""
    content = bytearray(save({"one": torch.zeros(8)}))
    tensor = dict(tensors_of(memoryview(content), "file"))["one"]
    content[-4:] = struct.pack("<f", 2.5)
    assert tensor[-1] == 2.5


def test_numbers_at_odd_places_are_copied() -> None:
    header = {"a": about(0, 2, (1,), "BF16"), "b": about(2, 10)}
    text = json.dumps(header)
    for spaces in range(4):
        padded = (text + " " * spaces).encode()
        data = b"\0\0" + struct.pack("<2f", 1.5, -2.0)
        found = read(struct.pack("<Q", len(padded)) + padded + data)
        assert found["b"].tolist() == [1.5, -2.0] and found["b"].data_ptr() % 4 == 0


LIES: dict[str, bytes] = {
    "a hole": stored({"a": about(0, 8), "b": about(12, 20)}, bytes(20)),
    "an overlap": stored({"a": about(0, 8), "b": about(4, 12)}, bytes(12)),
    "a byte too few": stored({"a": about(0, 8)}, bytes(7)),
    "a byte too many": stored({"a": about(0, 8)}, bytes(9)),
    "a late start": stored({"a": about(4, 12)}, bytes(12)),
    "a negative start": stored({"a": about(-8, 0)}),
    "backwards": stored({"a": about(8, 0)}, bytes(8)),
    "a shape too large": stored({"a": about(0, 8, (3,))}, bytes(8)),
    "a huge shape": stored({"a": about(0, 8, (1 << 40, 1 << 40))}, bytes(8)),
    "a negative shape": stored({"a": about(0, 8, (-1, -2))}, bytes(8)),
    "a shape of flags": stored({"a": about(0, 4, (True,))}, bytes(4)),
    "a shape of fractions": stored({"a": about(0, 8, (2.0,))}, bytes(8)),
    "a shape that is none": stored({"a": {**about(0, 8), "shape": "2"}}, bytes(8)),
    "three offsets": stored({"a": {**about(0, 8), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "no dtype": stored({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "a list": stored([about(0, 8)], bytes(8)),
    "a number for a tensor": stored({"a": 1}),
    "half a header": stored({"a": about(0, 8)})[:-5],
    "a long header": struct.pack("<Q", 1 << 63) + b"{}",
    "nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no JSON": struct.pack("<Q", 3) + b"\xff{}",
    "nothing": b"",
    "a length alone": bytes(8),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(content: bytes) -> None:
    with pytest.raises(ServiceError, match="file is corrupt") as caught:
        read(content)
    assert caught.value.reason == "ADAPTER_INVALID"


def test_another_dtype_is_named() -> None:
    with pytest.raises(ServiceError, match="tensor 'a' is F64; supported are F32, F16, BF16"):
        read(save({"a": torch.ones(2, dtype=torch.float64)}))
