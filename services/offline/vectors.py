"""Vectors of prompts offline, and all that is made of them: requests from a caller's prompts, and the results."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sluice.embeddings import add_inputs
from sluice.v1 import inference_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.calls.vectors import floats
from sluice_server.services.gateway.contract.embedding import POOLINGS, TRUNCATIONS
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Embedded
from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.prompts import Prompt

_POOLINGS = {value.value: number for number, value in POOLINGS.items()}
TRUNCATION_NAMES = {value.value: number for number, value in TRUNCATIONS.items()}
_T = TypeVar("_T")
_INPUT = re.compile(r"(?:inputs|documents|pairs)\[(\d+)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt.

    Attributes:
        num_tokens: tokens of the prompt, after truncation.
    """

    embedding: list[float]
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """How vectors are made; None leaves it to the model.

    Attributes:
        pooling: "last" or "mean", of an encoder also "first".
        dimensions: leading components that are kept.
        instruction: put before every text.
        truncate: "none", "left" or "right": what a prompt that is too long loses.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    instruction: str | None = None
    truncate: str = "none"


def requests_of(prompts: Sequence[Prompt], options: EmbeddingOptions, most: int) -> list[inference_pb2.EmbedRequest]:
    """Returns requests of at most `most` prompts each. Raises ServiceError for an option that does not exist."""
    request = inference_pb2.EmbedRequest(
        truncate=one_of("truncate", options.truncate, TRUNCATION_NAMES),
        normalize=options.normalize,
        dimensions=options.dimensions,
        instruction=options.instruction,
    )
    if options.pooling is not None:
        request.pooling = one_of("pooling", options.pooling, _POOLINGS)
    made = []
    for first in range(0, len(prompts), most):
        part = inference_pb2.EmbedRequest()
        part.CopyFrom(request)
        add_inputs(part.inputs, prompts[first : first + most])
        made.append(part)
    return made


def embedding_outputs(request: OpenRequest) -> list[EmbeddingOutput]:
    """Returns the vectors of a request that has finished."""
    found = request.outcome
    assert isinstance(found, Embedded)
    each = zip(found.vectors, found.num_tokens, strict=True)
    return [EmbeddingOutput(floats(vector).tolist(), num) for vector, num in each]


def of_prompt(error: ServiceError, at: int, most: int) -> PromptError:
    """Returns the error of the request with index `at` as that of the prompt which it names."""
    named = _INPUT.match(error.field)
    return PromptError(at * most + (int(named[1]) if named else 0), error)


def one_of(field: str, value: str, known: Mapping[str, _T]) -> _T:
    """Returns what an option's value stands for. Raises ServiceError for one that does not exist."""
    if value not in known:
        raise invalid(field, f"{value!r} is none of {', '.join(sorted(known))}")
    return known[value]
