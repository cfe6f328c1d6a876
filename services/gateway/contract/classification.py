"""Translates Classify, Rerank and Score into work for the ring, and the numbers of classification heads into scores."""

import math
from collections.abc import Sequence

from sluice.v1 import inference_pb2

from sluice_server.engine.checks import check_num, check_priority
from sluice_server.engine.errors import invalid, unsupported
from sluice_server.engine.models.labels import Activation, LabelsConfig
from sluice_server.engine.request import Pooling
from sluice_server.services.gateway.access.admission import BYTES_PER_TOKEN
from sluice_server.services.gateway.contract.embedding import check_instruction_size, read_inputs, truncation_of
from sluice_server.services.gateway.contract.served import check_model
from sluice_server.services.gateway.contract.translate import TranslatedRequest, check_bytes, size_of_text
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Embed,
    PairPrompt,
    Scheduling,
    Truncation,
    VectorOptions,
)

ACTIVATIONS = {
    Activation.NONE: inference_pb2.CLASS_ACTIVATION_NONE,
    Activation.SIGMOID: inference_pb2.CLASS_ACTIVATION_SIGMOID,
    Activation.SOFTMAX: inference_pb2.CLASS_ACTIVATION_SOFTMAX,
}


def classification(
    request: inference_pb2.ClassifyRequest, priority: int, settings: GatewaySettings
) -> TranslatedRequest:
    """Returns the work of Classify; `priority` is that of the metadata. Raises `ServiceError`."""
    check_model(request, settings.model)
    check_priority(priority, settings.limits)
    labels, truncation = labels_of("Classify", settings.model), truncation_of(request.truncate)
    if labels.words is not None:
        text = "Classify is not supported with this model, which reads a query and a document: use Rerank"
        raise unsupported("Classify", text)
    inputs, reserve = read_inputs(request.inputs, truncation, settings)
    return TranslatedRequest(Embed(inputs, _options(labels), truncation, "", Scheduling(priority=priority)), reserve)


def ranking(request: inference_pb2.RerankRequest, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of Rerank; `priority` is that of the metadata. Raises `ServiceError`."""
    check_model(request, settings.model)
    check_priority(priority, settings.limits)
    options, query = _options(_class_of("Rerank", settings.model)), request.query
    truncation = _truncation(request, settings.model)
    if not query:
        raise invalid("query", "is empty; send at least one byte of text")
    if request.HasField("top_n") and not request.top_n:
        raise invalid("top_n", "0 is below 1; leave it out for all", limit=1)
    if not request.documents:
        raise invalid("documents", "is empty; send at least one")
    check_num("documents", len(request.documents), settings.max_embed_inputs)
    documents = list(request.documents)
    sizes = [size_of_text(one) for one in documents]
    empty = next((at for at, size in enumerate(sizes) if not size), None)
    if empty is not None:
        raise invalid(f"documents[{empty}]", "is empty; send at least one byte of text")
    own = size_of_text(query)
    check_bytes(own + sum(sizes), settings, "documents")
    reserve = sum((own + size) // BYTES_PER_TOKEN + 1 for size in sizes)
    instruction = _instruction_of(request, settings.model)
    pairs = tuple(_pair(query, one, settings.model, instruction) for one in documents)
    work = Embed(pairs, options, truncation, scheduling=Scheduling(priority=priority), field="documents")
    return TranslatedRequest(work, reserve)


def scoring(request: inference_pb2.ScoreRequest, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of Score; `priority` is that of the metadata. Raises `ServiceError`."""
    check_model(request, settings.model)
    check_priority(priority, settings.limits)
    options = _options(_class_of("Score", settings.model))
    truncation = _truncation(request, settings.model)
    if not request.pairs:
        raise invalid("pairs", "is empty; send at least one")
    check_num("pairs", len(request.pairs), settings.max_embed_inputs)
    sizes = []
    for at, pair in enumerate(request.pairs):
        for name, text in (("first", pair.first), ("second", pair.second)):
            if not text:
                raise invalid(f"pairs[{at}].{name}", "is empty; send at least one byte of text")
        sizes.append(size_of_text(pair.first) + size_of_text(pair.second))
    check_bytes(sum(sizes), settings, "pairs")
    instruction = _instruction_of(request, settings.model)
    pairs = tuple(_pair(one.first, one.second, settings.model, instruction) for one in request.pairs)
    work = Embed(pairs, options, truncation, scheduling=Scheduling(priority=priority), field="pairs")
    return TranslatedRequest(work, sum(size // BYTES_PER_TOKEN + 1 for size in sizes))


def _instruction_of(request: inference_pb2.RerankRequest | inference_pb2.ScoreRequest, model: ModelInfo) -> str:
    """Returns the instruction of a request, or else that of the model. Raises `ServiceError`."""
    if not request.HasField("instruction"):
        return model.instruction
    if model.labels is None or model.labels.words is None:
        text = "instruction is not supported with this model, whose head has no place for it: leave it out"
        raise unsupported("instruction", text)
    check_instruction_size(request.instruction)
    return request.instruction


def _truncation(request: inference_pb2.RerankRequest | inference_pb2.ScoreRequest, model: ModelInfo) -> Truncation:
    """Returns what a pair that is too long loses. Raises `ServiceError`."""
    found = truncation_of(request.truncate)
    if found is not Truncation.NONE and model.labels is not None and model.labels.words is not None:
        text = "truncate is not supported with this model, whose chat template would be cut: send shorter texts"
        raise unsupported("truncate", text)
    return found


def _pair(query: str, document: str, model: ModelInfo, instruction: str) -> PairPrompt | ChatPrompt:
    """Returns the prompt that the head of the model reads: a model that answers with a word has a template for it."""
    if model.labels is None or model.labels.words is None:
        return PairPrompt(query, document)
    first = (ChatMessage("system", instruction),) if instruction else ()
    return ChatPrompt((*first, ChatMessage("query", query), ChatMessage("document", document)))


def labels_of(rpc: str, model: ModelInfo) -> LabelsConfig:
    """Returns the classes of the model. Raises `ServiceError` for a model without a classification head."""
    if model.labels is None:
        raise unsupported(rpc, f"{rpc} is not supported with this model, which has no classification head")
    return model.labels


def _class_of(rpc: str, model: ModelInfo) -> LabelsConfig:
    """Returns the only class of the model. Raises `ServiceError` for a model with none or several."""
    labels = labels_of(rpc, model)
    if len(labels.names) != 1:
        text = f"{rpc} is not supported with this model, whose head has {len(labels.names)} classes: it needs one"
        raise unsupported(rpc, text)
    return labels


def activated(numbers: Sequence[float], activation: Activation) -> list[float]:
    """Returns the scores of an input's classes."""
    if activation is Activation.NONE:
        return list(numbers)
    if activation is Activation.SIGMOID:
        return [_sigmoid(one) for one in numbers]
    highest = max(numbers)
    powers = [math.exp(one - highest) for one in numbers]
    return [one / sum(powers) for one in powers]


def _sigmoid(number: float) -> float:
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    power = math.exp(number)
    return power / (1.0 + power)


def _options(labels: LabelsConfig) -> VectorOptions:
    return VectorOptions(Pooling.CLASSES, normalize=False, dimensions=len(labels.names))
