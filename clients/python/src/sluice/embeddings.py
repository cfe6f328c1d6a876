"""Vectors of inputs: the request from plain values, and the answer."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypedDict

from sluice.v1 import inference_pb2, types_pb2

Input: TypeAlias = str | Sequence[int]

_POOLINGS = {
    "first": inference_pb2.POOLING_FIRST,
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}
TRUNCATIONS = {
    "none": inference_pb2.TRUNCATION_NONE,
    "left": inference_pb2.TRUNCATION_LEFT,
    "right": inference_pb2.TRUNCATION_RIGHT,
}


class InputField(Protocol):
    """The repeated field of a request's inputs."""

    def add(self, *, text: str = ...) -> inference_pb2.EmbedInput:
        """Adds an input and returns it."""


class EmbedOptions(TypedDict, total=False):
    """How vectors are made; what is absent is left to the model. The comments of `EmbedRequest` explain each."""

    model: str
    revision: str
    pooling: Literal["first", "last", "mean"]
    normalize: bool
    dimensions: int
    truncate: Literal["none", "left", "right"]
    instruction: str


class Embeddings:
    """The vectors of a call.

    Attributes:
        response: the answer as the contract has it.
    """

    def __init__(self, response: inference_pb2.EmbedResponse) -> None:
        self.response = response

    def __len__(self) -> int:
        return len(self.response.embeddings)

    def __getitem__(self, index: int) -> list[float]:
        """Returns the vector of the input with that index."""
        return list(self.response.embeddings[index].values)

    @property
    def usage(self) -> types_pb2.Usage:
        """Tokens of all inputs, and how many of them were cached."""
        return self.response.usage


def embed_request(inputs: Input | Sequence[Input], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Returns the request for one input or several."""
    request = inference_pb2.EmbedRequest(
        model=options.get("model"),
        revision=options.get("revision"),
        normalize=options.get("normalize"),
        dimensions=options.get("dimensions"),
        instruction=options.get("instruction"),
    )
    if "pooling" in options:
        request.pooling = _POOLINGS[options["pooling"]]
    if "truncate" in options:
        request.truncate = TRUNCATIONS[options["truncate"]]
    add_inputs(request.inputs, inputs)
    return request


def add_inputs(to: InputField, inputs: Input | Sequence[Input]) -> None:
    """Adds one input or several to the field of a request. Raises TypeError for a mix of ids and texts."""
    for one in _listed(inputs):
        if isinstance(one, str):
            to.add(text=one)
        else:
            to.add().token_ids.ids.extend(one)


def _listed(inputs: Input | Sequence[Input]) -> list[Input]:
    if isinstance(inputs, str):
        return [inputs]
    ids = [one for one in inputs if isinstance(one, int)]
    others = [one for one in inputs if not isinstance(one, int)]
    if ids and others:
        raise TypeError("inputs mixes token ids with texts or lists: give one list of ids, or a list of inputs")
    return [ids] if ids else others
