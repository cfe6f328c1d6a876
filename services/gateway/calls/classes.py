"""Converts the numbers of a classification head to the answers of Classify, Rerank and Score."""

from collections.abc import Iterator

from sluice.v1 import inference_pb2

from sluice_server.engine.models.labels import LabelsConfig
from sluice_server.services.gateway.calls.responses import usage
from sluice_server.services.gateway.calls.vectors import SLICE_COMPONENTS, floats
from sluice_server.services.gateway.contract.classification import ACTIVATIONS, activated
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Embedded


def classified(request: OpenRequest, found: Embedded, labels: LabelsConfig) -> Iterator[bytes]:
    """Yields the encoded response of Classify in slices, between which other calls can run."""
    yield inference_pb2.ClassifyResponse(
        model=request.envelope.model,
        revision=request.envelope.revision,
        labels=labels.names,
        usage=usage(request.used),
        activation=ACTIVATIONS[labels.activation],
    ).SerializeToString()
    step = max(1, SLICE_COMPONENTS // len(labels.names))
    for at in range(0, len(found.vectors), step):
        part = inference_pb2.ClassifyResponse()
        for vector, num in zip(found.vectors[at : at + step], found.num_tokens[at : at + step], strict=True):
            part.results.add(scores=activated(floats(vector), labels.activation), prompt_tokens=num)
        yield part.SerializeToString()


def ranked(
    request: OpenRequest, found: Embedded, labels: LabelsConfig, top_n: int | None
) -> inference_pb2.RerankResponse:
    """Returns the response of Rerank: the best documents first, equal ones by their index."""
    scores = scores_of(found, labels)
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:top_n]
    return inference_pb2.RerankResponse(
        model=request.envelope.model,
        revision=request.envelope.revision,
        results=[inference_pb2.RankedDocument(index=at, score=scores[at]) for at in order],
        usage=usage(request.used),
    )


def scored(request: OpenRequest, found: Embedded, labels: LabelsConfig) -> inference_pb2.ScoreResponse:
    """Returns the response of Score."""
    return inference_pb2.ScoreResponse(
        model=request.envelope.model,
        revision=request.envelope.revision,
        scores=scores_of(found, labels),
        usage=usage(request.used),
    )


def scores_of(found: Embedded, labels: LabelsConfig) -> list[float]:
    """Returns the score of each pair by a head of one class."""
    return [activated(floats(vector), labels.activation)[0] for vector in found.vectors]
