"""Tokens of a prompt or a conversation over HTTP, and the text of tokens, with vLLM's bodies."""

from typing import Any

import grpc
import msgspec
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.errors import bad_request, naming
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.recovery import repeated
from sluice_server.services.edge.requests import Metadata, metadata_of, read_body
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.translate import chat_names, chat_spec
from sluice_server.services.edge.wire import Chat, ChatRequest, decode
from sluice_server.services.edge.wire_parts import FunctionTool, Message

OF_PROMPT = FieldNames({"text": "prompt", "prompt": "prompt"})
OF_TOKENS = FieldNames({"token_ids": "tokens[]"})
OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "tools",
    "chat_template",
    "chat_template_kwargs",
)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # absent: to a prompt, not to messages
    add_generation_prompt: bool | None = None  # this and the next ones go with messages
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    return_offsets: bool | None = None  # this and the next one are extensions of ours
    count_only: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False  # as vLLM does; an extension of ours


class TokenRoutes:
    """The handlers of both routes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._control: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked = decode(await read_body(request), TokenizeRequest)
        metadata, wanted = metadata_of(request), to_tokenize(asked)
        with naming(tokenize_names(asked)):
            found = await repeated(self._channel, lambda: self._inference.Tokenize(wanted, metadata=metadata))
        ids = [one.id for one in found.tokens]
        texts = [one.piece.decode("utf-8", "replace") for one in found.tokens] if asked.return_token_strs else None
        longest = await self._longest(found.model, metadata)
        answer = {"count": found.num_tokens, "max_model_len": longest, "tokens": ids, "token_strs": texts}
        if asked.return_offsets:
            answer["offsets"] = list(zip(found.starts, found.ends, strict=True))
            answer["prompt"] = found.text if asked.prompt is None else asked.prompt
        return as_json(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = decode(await read_body(request), DetokenizeRequest)
        if any(not 0 <= one < 1 << 32 for one in asked.tokens):
            raise bad_request("tokens", "holds a number that is no token id")
        wanted = inference_pb2.DetokenizeRequest(
            model=asked.model, token_ids=asked.tokens, skip_special_tokens=asked.skip_special_tokens
        )
        metadata = metadata_of(request)
        with naming(OF_TOKENS):
            found = await repeated(self._channel, lambda: self._inference.Detokenize(wanted, metadata=metadata))
        return as_json({"prompt": found.text})

    async def _longest(self, model: str, metadata: Metadata) -> int:
        wanted = control_pb2.GetModelRequest(model=model)
        return (await self._control.GetModel(wanted, metadata=metadata)).model.context_length


def to_tokenize(asked: TokenizeRequest) -> inference_pb2.TokenizeRequest:
    """Returns the request of the contract. Raises EdgeError."""
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("prompt", "and messages exclude each other, and one of them is needed")
    if asked.messages is None:
        for name in OF_MESSAGES:
            if getattr(asked, name):
                raise bad_request(name, "goes with messages")
        return inference_pb2.TokenizeRequest(text=asked.prompt or "", **_options(asked))
    chat = chat_spec(_chat(asked, asked.messages)).chat
    return inference_pb2.TokenizeRequest(chat=chat, **_options(asked))


def _options(asked: TokenizeRequest) -> dict[str, Any]:
    """Returns the fields of the contract's request besides the prompt. Raises EdgeError."""
    for name in ("return_token_strs", "return_offsets"):
        if asked.count_only and getattr(asked, name):
            raise bad_request(name, "is about tokens, and count_only returns none: leave one of them out")
    return {
        "model": asked.model,
        "add_special_tokens": asked.add_special_tokens,
        "count_only": asked.count_only,
        "offsets": asked.return_offsets,
    }


def tokenize_names(asked: TokenizeRequest) -> FieldNames:
    """Returns the names of a request's fields in errors."""
    return OF_PROMPT if asked.messages is None else chat_names(_chat(asked, asked.messages))


def _chat(asked: TokenizeRequest, messages: list[Message]) -> Chat:
    """Returns the chat of a request with messages."""
    return ChatRequest(messages=messages, **{name: getattr(asked, name) for name in OF_MESSAGES})
