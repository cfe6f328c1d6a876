"""Classes and rankings over HTTP: vLLM's /classify, and /v1/rerank as Jina, Cohere and vLLM have it."""

from typing import Any, Literal

import grpc
import msgspec
from sluice.v1 import inference_pb2, inference_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.embeddings import MAX_UINT32, TRUNCATE, input_names, inputs_of, truncation_of
from sluice_server.services.edge.errors import bad_request, naming
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.requests import metadata_of, read_body, until_gone
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.wire import decode

_NAMES = FieldNames({"truncate": TRUNCATE})  # all others of a ranking are the contract's


class ClassificationRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of /classify."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    user: str | None = None  # a label, without effect


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: list[str | dict[str, str]]  # texts, or objects with a text
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    instruction: str | None = None
    user: str | None = None  # a label, without effect


class Ranking:
    """The handlers of these routes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def classify(self, request: Request) -> Response:
        """POST /classify."""
        asked = decode(await read_body(request), ClassificationRequest)
        wanted = inference_pb2.ClassifyRequest(model=asked.model or None, inputs=inputs_of(asked.input))
        with naming(FieldNames(input_names(asked.input))):
            found = await until_gone(request.receive, self._inference.Classify(wanted, metadata=metadata_of(request)))
        data = []
        for index, one in enumerate(found.results):
            scores = list(one.scores)
            label = found.labels[scores.index(max(scores))]
            data.append({"index": index, "label": label, "probs": scores, "num_classes": len(scores)})
        usage = _usage(found.usage.prompt_tokens)
        return as_json({"object": "list", "model": found.model, "data": data, "usage": usage})

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        asked = decode(await read_body(request), RerankRequest)
        documents = [_text(one, f"documents[{at}]") for at, one in enumerate(asked.documents)]
        if asked.top_n is not None and not 0 <= asked.top_n <= MAX_UINT32:
            raise bad_request("top_n", f"{asked.top_n} is not in [1, {MAX_UINT32}]")
        wanted = inference_pb2.RerankRequest(
            model=asked.model or None,
            query=asked.query,
            documents=documents,
            top_n=asked.top_n,
            instruction=asked.instruction,
            truncate=truncation_of(asked),
        )
        with naming(_NAMES):
            found = await until_gone(request.receive, self._inference.Rerank(wanted, metadata=metadata_of(request)))
        results: list[dict[str, Any]] = []
        for one in found.results:
            result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
            if asked.return_documents:
                result["document"] = {"text": documents[one.index]}
            results.append(result)
        return as_json({"model": found.model, "results": results, "usage": _usage(found.usage.prompt_tokens)})


def _text(document: str | dict[str, str], field: str) -> str:
    if isinstance(document, str):
        return document
    if set(document) != {"text"}:
        raise bad_request(field, "must be a text, or an object with text alone")
    return document["text"]


def _usage(num: int) -> dict[str, int]:
    return {"prompt_tokens": num, "total_tokens": num}
