"""The table of routes: what the server answers, and from which `/openapi.json` is made."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice_server.services.edge.adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from sluice_server.services.edge.embeddings import EmbeddingRequest, EmbeddingRoutes
from sluice_server.services.edge.generation import GenerationRoutes
from sluice_server.services.edge.information import Information
from sluice_server.services.edge.observed import HttpObserver
from sluice_server.services.edge.page import page
from sluice_server.services.edge.ranking import ClassificationRequest, Ranking, RerankRequest
from sluice_server.services.edge.scoring import ScoreBody, Scoring
from sluice_server.services.edge.tokens import DetokenizeRequest, TokenizeRequest, TokenRoutes
from sluice_server.services.edge.wire import ChatRequest, CompletionRequest

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeRoute:
    """One route.

    Attributes:
        body: the struct of the request's body; None: a GET without one.
        answers: media types of the answer.
        is_open: answered without a key, also where the service has an access file.
    """

    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = ("application/json",)
    is_open: bool = False

    @property
    def method(self) -> str:
        """GET, or POST with a body."""
        return "GET" if self.body is None else "POST"

    def served(self) -> Route:
        """Returns the route for the application."""
        return Route(self.path, self.handler, methods=[self.method])


def table(channel: grpc.aio.Channel, observer: HttpObserver, clock: Callable[[], float]) -> list[EdgeRoute]:
    """Returns the routes in front of `channel`, but for the one that describes them."""
    generation, tokens, ranking = GenerationRoutes(channel, clock), TokenRoutes(channel), Ranking(channel)
    information, scoring, adapters = Information(channel, observer), Scoring(channel, clock), AdapterRoutes(channel)
    both = ("application/json", "text/event-stream")
    return [  # matched in this order: what is asked for most often stands first
        EdgeRoute("/health", information.health, "Tell whether the service lives", is_open=True),
        EdgeRoute("/ping", information.ping, "Tell whether the service lives", is_open=True),
        EdgeRoute("/health/ready", information.ready, "Tell whether requests are admitted", is_open=True),
        EdgeRoute("/healthz", information.healthz, "Tell whether requests are admitted", is_open=True),
        EdgeRoute("/v1/chat/completions", generation.chat, "Answer a conversation", ChatRequest, both),
        EdgeRoute("/v1/completions", generation.completions, "Continue prompts", CompletionRequest, both),
        EdgeRoute("/v1/embeddings", EmbeddingRoutes(channel).embeddings, "Make vectors of texts", EmbeddingRequest),
        EdgeRoute("/v1/rerank", ranking.rerank, "Rank documents", RerankRequest),
        EdgeRoute("/rerank", ranking.rerank, "Rank documents", RerankRequest),
        EdgeRoute("/v1/score", scoring.score, "Score pairs of texts", ScoreBody),
        EdgeRoute("/score", scoring.score, "Score pairs of texts", ScoreBody),
        EdgeRoute("/classify", ranking.classify, "Tell the classes of texts", ClassificationRequest),
        EdgeRoute("/v1/models", information.models, "List the models"),
        EdgeRoute("/v1/models/{model:path}", information.model, "Describe a model"),
        EdgeRoute("/v1/load_lora_adapter", adapters.load, "Load an adapter", LoadAdapterBody, ("text/plain",)),
        EdgeRoute("/v1/unload_lora_adapter", adapters.unload, "Unload an adapter", UnloadAdapterBody, ("text/plain",)),
        EdgeRoute("/tokenize", tokens.tokenize, "Turn a prompt or messages into tokens", TokenizeRequest),
        EdgeRoute("/detokenize", tokens.detokenize, "Turn tokens into text", DetokenizeRequest),
        EdgeRoute("/load", information.load, "Count the open requests"),
        EdgeRoute("/version", information.version, "Name the version", is_open=True),
        EdgeRoute("/metrics", information.metrics, "Show this process's metrics", None, ("text/plain",), True),
        EdgeRoute("/", page, "Show a page for trying the models", None, ("text/html",), True),
    ]
