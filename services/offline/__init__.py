"""Offline inference: runs a model in this process with the service's own tokenizer, engine and detokenizer."""

from sluice_server.engine.errors import ServiceError
from sluice_server.services.offline.classes import ClassificationOutput, RankedOutput
from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.llm import LLM
from sluice_server.services.offline.outputs import CompletionOutput, Logprob, RequestOutput
from sluice_server.services.offline.params import SamplingParams
from sluice_server.services.offline.vectors import EmbeddingOutput

__all__ = [
    "LLM",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "PromptError",
    "RankedOutput",
    "RequestOutput",
    "SamplingParams",
    "ServiceError",
]
