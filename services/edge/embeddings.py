"""Vectors over HTTP: OpenAI's /v1/embeddings, with vLLM's further fields."""

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import grpc
import msgspec
from sluice.v1 import inference_pb2, inference_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.errors import bad_request, naming, unsupported
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.recovery import repeated
from sluice_server.services.edge.requests import metadata_of, read_body, until_gone
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.wire import decode

MAX_UINT32 = (1 << 32) - 1
SLICE_COMPONENTS = 1 << 14  # of vectors written between two other requests: a few milliseconds
_SIDES = {"left": inference_pb2.TRUNCATION_LEFT, "right": inference_pb2.TRUNCATION_RIGHT}
_POOLINGS = {"last": inference_pb2.POOLING_LAST, "mean": inference_pb2.POOLING_MEAN, "cls": inference_pb2.POOLING_FIRST}
TRUNCATE = "truncate_prompt_tokens"  # the client's name of `truncate`
_NAMES = {"encoding": "encoding_format", "truncate": TRUNCATE}
_WHOLE_CONTEXT = -1  # of truncate_prompt_tokens


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None  # a label, without effect
    normalize: bool | None = None  # these are vLLM's
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["last", "mean", "cls"] | None = None  # and these are ours
    instruction: str | None = None


class EmbeddingRoutes:
    """The handler of the route."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = decode(await read_body(request), EmbeddingRequest)
        wanted, metadata = to_embed(asked), metadata_of(request)
        call = repeated(self._channel, lambda: self._inference.Embed(wanted, metadata=metadata))
        with naming(FieldNames({**input_names(asked.input), **_NAMES})):
            found = await until_gone(request.receive, call)
        data = await _encoded(found.embeddings, is_base64=asked.encoding_format == "base64")
        num = found.usage.prompt_tokens
        usage = {"prompt_tokens": num, "total_tokens": num}
        return as_json({"object": "list", "data": data, "model": found.model, "usage": usage})


def to_embed(asked: EmbeddingRequest) -> inference_pb2.EmbedRequest:
    """Returns the request of the contract. Raises EdgeError."""
    if asked.add_special_tokens is False:
        raise unsupported("add_special_tokens", "send token ids in place of a text without special tokens")
    if asked.dimensions is not None and not 0 <= asked.dimensions <= MAX_UINT32:
        raise bad_request("dimensions", f"{asked.dimensions} is not in [1, {MAX_UINT32}]")
    return inference_pb2.EmbedRequest(
        model=asked.model or None,
        inputs=inputs_of(asked.input),
        dimensions=asked.dimensions,
        normalize=asked.normalize,
        pooling=None if asked.pooling is None else _POOLINGS[asked.pooling],
        instruction=asked.instruction,
        truncate=truncation_of(asked),
    )


class Truncated(Protocol):
    """The fields of a body that say what an input loses that is too long."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """The most tokens."""

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        """What is dropped."""


def truncation_of(asked: Truncated) -> "inference_pb2.Truncation.ValueType | None":
    """Returns what an input that is too long loses; as vLLM does, its end where no side is given."""
    if asked.truncate_prompt_tokens is None:
        if asked.truncation_side is not None:
            raise bad_request("truncation_side", "goes with truncate_prompt_tokens")
        return None
    if asked.truncate_prompt_tokens != _WHOLE_CONTEXT:
        text = "is supported as -1, which is the model's context: cut the texts yourself for another number"
        raise unsupported("truncate_prompt_tokens", text)
    return _SIDES[asked.truncation_side or "right"]


def inputs_of(given: str | list[str | int | list[int]]) -> list[inference_pb2.EmbedInput]:
    """Returns the inputs: one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [inference_pb2.EmbedInput(text=given)]
    if given and all(isinstance(one, int) for one in given):
        return [_of_ids(given, "input")]
    made = []
    for at, one in enumerate(given):
        if isinstance(one, int):
            raise bad_request(f"input[{at}]", "is a number among texts or lists: send texts, or lists of token ids")
        made.append(inference_pb2.EmbedInput(text=one) if isinstance(one, str) else _of_ids(one, f"input[{at}]"))
    return made


def input_names(given: str | list[str | int | list[int]]) -> dict[str, str]:
    """Returns the name of `input` in errors, by path: of one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return {"inputs": "input"}
    if given and isinstance(given[0], int):
        return {"inputs": "input", "inputs.token_ids": "input[-][]"}
    return {"inputs": "input[]", "inputs.token_ids": "input[][]"}


def _of_ids(ids: Sequence[Any], field: str) -> inference_pb2.EmbedInput:
    if any(not 0 <= one <= MAX_UINT32 for one in ids):
        raise bad_request(field, "holds a number that is no token id")
    made = inference_pb2.EmbedInput()
    made.token_ids.ids.extend(ids)
    return made


async def _encoded(found: Sequence[inference_pb2.Embedding], *, is_base64: bool) -> list[msgspec.Raw]:
    """Returns the entries of the answer, encoded; other requests are answered in between."""
    made, num = [], 0
    for index, one in enumerate(found):
        components = array("f", one.values)
        embedding = _base64(components) if is_base64 else components.tolist()
        entry = {"object": "embedding", "index": index, "embedding": embedding}
        made.append(msgspec.Raw(msgspec.json.encode(entry)))
        num += len(components)
        if num >= SLICE_COMPONENTS:
            await asyncio.sleep(0)
            num = 0
    return made


def _base64(components: "array[float]") -> str:
    """Returns the components as float32, little-endian, in base64: what OpenAI's clients read."""
    if sys.byteorder == "big":
        components.byteswap()
    return base64.b64encode(components.tobytes()).decode()
