"""Converts the answer of Embed to a message of the contract, in slices."""

import sys
from array import array
from collections.abc import Iterator

from sluice.v1 import inference_pb2

from sluice_server.services.gateway.calls.responses import usage
from sluice_server.services.gateway.contract.embedding import ENCODINGS, POOLINGS
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Embedded
from sluice_server.services.messages.work import Embed, VectorEncoding

SLICE_COMPONENTS = 1 << 14  # about a millisecond
_POOLINGS = {value: number for number, value in POOLINGS.items()}
_ENCODINGS = {value: number for number, value in ENCODINGS.items() if number}


def embedded(request: OpenRequest, found: Embedded) -> Iterator[bytes]:
    """Yields the encoded response of Embed in slices, between which other calls can run."""
    envelope, work = request.envelope, request.asked.work
    assert isinstance(work, Embed)
    options = work.options
    yield inference_pb2.EmbedResponse(
        model=envelope.model,
        revision=envelope.revision,
        usage=usage(request.used),
        pooling=_POOLINGS[options.pooling],
        normalized=options.normalize,
        dimensions=options.dimensions,
        encoding=_ENCODINGS[options.encoding],
    ).SerializeToString()
    step = max(1, SLICE_COMPONENTS // options.dimensions)
    for at in range(0, len(found.vectors), step):
        part = inference_pb2.EmbedResponse()
        for vector, num in zip(found.vectors[at : at + step], found.num_tokens[at : at + step], strict=True):
            if options.encoding is VectorEncoding.FLOAT:
                part.embeddings.add(values=floats(vector), prompt_tokens=num)
            else:
                part.embeddings.add(data=vector, prompt_tokens=num)
        yield part.SerializeToString()


def floats(vector: bytes) -> "array[float]":
    """Returns the components of a vector of float32, little-endian."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found
