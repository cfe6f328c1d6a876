"""Vectors of inputs: the request from plain values, and the answer."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, TypedDict

from google.protobuf.message import Message

from sluice.options import check_names, choose, unfit
from sluice.v1 import inference_pb2, types_pb2

Input: TypeAlias = str | Sequence[int]

_POOLINGS = {
    "first": inference_pb2.POOLING_FIRST,
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}
_TRUNCATIONS = {
    "none": inference_pb2.TRUNCATION_NONE,
    "left": inference_pb2.TRUNCATION_LEFT,
    "right": inference_pb2.TRUNCATION_RIGHT,
}
_CHOICES: Mapping[str, Mapping[str, int]] = {"pooling": _POOLINGS, "truncate": _TRUNCATIONS}


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
    """Returns the request for one input or several. Raises TypeError and ValueError, which name the option."""
    check_names(options, EmbedOptions.__annotations__, "vectors")
    request = inference_pb2.EmbedRequest()
    set_options(request, options)
    add_inputs(request.inputs, inputs)
    return request


def set_options(request: Message, options: Mapping[str, object]) -> None:
    """Sets the options of a request of vectors, classes, rankings or scores, whose fields have their names.

    Raises TypeError and ValueError, which name the option.
    """
    for name, value in options.items():
        if name in _CHOICES:
            value = choose(name, value, _CHOICES[name])
        try:
            setattr(request, name, value)
        except (TypeError, ValueError) as error:
            raise unfit(name, value, error) from None


def add_inputs(to: InputField, inputs: Input | Sequence[Input]) -> None:
    """Adds one input or several to the field of a request.

    Raises TypeError for a mix of ids and texts and for bytes, ValueError for ids that are none.
    """
    for one in _listed(inputs):
        try:
            if isinstance(one, str):
                to.add(text=one)
            elif isinstance(one, bytes | bytearray):  # sequences of integers, which would be taken for token ids
                raise TypeError("a text or a list of token ids is wanted")
            else:
                to.add().token_ids.ids.extend(one)
        except (TypeError, ValueError) as error:
            raise unfit("inputs", one, error) from None


def _listed(inputs: Input | Sequence[Input]) -> list[Input]:
    if isinstance(inputs, str | bytes | bytearray):
        return [inputs]
    ids = [one for one in inputs if isinstance(one, int)]
    others = [one for one in inputs if not isinstance(one, int)]
    if ids and others:
        raise TypeError("inputs mixes token ids with texts or lists: give one list of ids, or a list of inputs")
    return [ids] if ids else others
