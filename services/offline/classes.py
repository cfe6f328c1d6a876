"""Classes of prompts, rankings and scores offline: requests of the contract from a caller's texts, and the results."""

import dataclasses
from collections.abc import Sequence

from sluice.embeddings import add_inputs
from sluice.v1 import inference_pb2

from sluice_server.engine.models.labels import LabelsConfig
from sluice_server.services.gateway.calls.classes import scores_of
from sluice_server.services.gateway.calls.vectors import floats
from sluice_server.services.gateway.contract.classification import activated
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Embedded
from sluice_server.services.offline.prompts import Prompt
from sluice_server.services.offline.vectors import TRUNCATION_NAMES, one_of


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of a prompt.

    Attributes:
        scores: a number for each of `labels`.
        num_tokens: tokens of the prompt, after truncation.
    """

    labels: tuple[str, ...]
    scores: list[float]
    num_tokens: int

    @property
    def label(self) -> str:
        """The class with the highest score."""
        return self.labels[self.scores.index(max(self.scores))]


@dataclasses.dataclass(frozen=True, slots=True)
class RankedOutput:
    """A document and how well it answers the query.

    Attributes:
        index: its place among the documents.
    """

    index: int
    score: float


def classify_requests(prompts: Sequence[Prompt], truncate: str, most: int) -> list[inference_pb2.ClassifyRequest]:
    """Returns requests of at most `most` prompts each. Raises ServiceError for an option that does not exist."""
    chosen, made = one_of("truncate", truncate, TRUNCATION_NAMES), []
    for first in range(0, len(prompts), most):
        request = inference_pb2.ClassifyRequest(truncate=chosen)
        add_inputs(request.inputs, prompts[first : first + most])
        made.append(request)
    return made


def rerank_requests(  # the parts of a request
    query: str, documents: Sequence[str], top_n: int | None, instruction: str | None, truncate: str, most: int
) -> list[inference_pb2.RerankRequest]:
    """Returns requests of at most `most` documents each, and one for no documents, which is refused."""
    if isinstance(documents, str):
        raise TypeError("documents is one text: give a list of texts")
    return [
        inference_pb2.RerankRequest(
            query=query,
            documents=documents[first : first + most],
            top_n=top_n,
            instruction=instruction,
            truncate=one_of("truncate", truncate, TRUNCATION_NAMES),
        )
        for first in range(0, max(1, len(documents)), most)
    ]


def score_requests(
    pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: str, most: int
) -> list[inference_pb2.ScoreRequest]:
    """Returns requests of at most `most` pairs each."""
    chosen = one_of("truncate", truncate, TRUNCATION_NAMES)
    each = [inference_pb2.TextPair(first=first, second=second) for first, second in pairs]
    return [
        inference_pb2.ScoreRequest(pairs=each[first : first + most], instruction=instruction, truncate=chosen)
        for first in range(0, len(each), most)
    ]


def classification_outputs(request: OpenRequest, labels: LabelsConfig | None) -> list[ClassificationOutput]:
    """Returns the classes of a request that has finished; `labels` are those of the model."""
    found = request.outcome
    assert isinstance(found, Embedded) and labels is not None
    return [
        ClassificationOutput(labels.names, activated(floats(vector), labels.activation), num)
        for vector, num in zip(found.vectors, found.num_tokens, strict=True)
    ]


def score_outputs(request: OpenRequest, labels: LabelsConfig | None) -> list[float]:
    """Returns the scores of a request that has finished; `labels` are those of the model."""
    found = request.outcome
    assert isinstance(found, Embedded) and labels is not None
    return scores_of(found, labels)


def ranked(scores: Sequence[float], top_n: int | None) -> list[RankedOutput]:
    """Returns the documents with the highest scores, equal ones by their index."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:top_n]
    return [RankedOutput(at, scores[at]) for at in order]
