"""Tensors of one element, as the protocol encodes them: text as BYTES, switches as BOOL, counts as UINT32.

Reads both forms of contents, raw and typed; writes raw ones, as Triton does. Independent of what the tensors mean.
"""

import dataclasses
import struct

from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip

_LENGTH = struct.Struct("<I")  # before each element of raw BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Name and type of a tensor, for metadata and checks."""

    name: str
    datatype: str


def read_inputs(request: oip.ModelInferRequest, known: dict[str, Tensor]) -> dict[str, str | bool]:
    """Returns the inputs by name. Raises `ServiceError` for an unknown or duplicate one, or one of the wrong type or
    size."""
    found: dict[str, str | bool] = {}
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    for at, given in enumerate(request.inputs):
        tensor = known.get(given.name)
        if tensor is None or given.name in found:
            raise invalid(
                given.name[:64], f"is not an input of this model, or is given twice; inputs: {', '.join(known)}"
            )
        if given.datatype != tensor.datatype or any(size != 1 for size in given.shape):
            raise invalid(
                given.name, f"is {given.datatype[:16]} {list(given.shape[:8])}; {tensor.datatype} [1] is needed"
            )
        found[given.name] = _raw(tensor, raw[at]) if raw else _typed(tensor, given.contents)
    return found


def add_output(response: oip.ModelInferResponse, tensor: Tensor, value: str | int) -> None:
    """Adds a tensor of one element to a response."""
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1])
    if isinstance(value, str):
        data = value.encode()
        response.raw_output_contents.append(_LENGTH.pack(len(data)) + data)
    else:
        response.raw_output_contents.append(_LENGTH.pack(value))


def _raw(tensor: Tensor, data: bytes) -> str | bool:
    if tensor.datatype == "BOOL":
        if data not in (b"\x00", b"\x01"):
            raise invalid(tensor.name, f"has {len(data)} raw bytes; one of 0 or 1 is a BOOL")
        return data == b"\x01"
    if len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        raise invalid(tensor.name, "is not one element of BYTES: its length, 4 bytes little-endian, then the bytes")
    return _text(tensor, data[_LENGTH.size :])


def _typed(tensor: Tensor, contents: oip.InferTensorContents) -> str | bool:
    elements = contents.bool_contents if tensor.datatype == "BOOL" else contents.bytes_contents
    if len(elements) != 1:
        raise invalid(tensor.name, f"has {len(elements)} elements; 1 is needed")
    element = elements[0]
    return element if isinstance(element, bool) else _text(tensor, element)


def _text(tensor: Tensor, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(tensor.name, "is not UTF-8") from None
