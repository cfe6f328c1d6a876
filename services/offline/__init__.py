"""A model in this process: prompts in, texts out, by the service's own tokenizer, engine and detokenizer."""

from engine.errors import ServiceError
from services.offline.errors import PromptError
from services.offline.llm import LLM
from services.offline.outputs import CompletionOutput, Logprob, RequestOutput
from services.offline.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "PromptError", "RequestOutput", "SamplingParams", "ServiceError"]
