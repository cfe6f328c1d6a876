"""Tokens of a prompt or a conversation over HTTP, and the text of tokens, with vLLM's bodies."""

from typing import Any

import grpc
import msgspec
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.errors import bad_request, unsupported
from sluice_server.services.edge.recovery import repeated
from sluice_server.services.edge.requests import Metadata, metadata_of, read_body
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.translate import chat_spec
from sluice_server.services.edge.wire import Chat, decode
from sluice_server.services.edge.wire_parts import FunctionTool, Message


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # to a prompt; absent: true
    add_generation_prompt: bool | None = None  # after messages; absent: true
    continue_final_message: bool | None = None  # not built
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


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
        found = await repeated(self._channel, lambda: self._inference.Tokenize(wanted, metadata=metadata))
        ids = [one.id for one in found.tokens]
        texts = [one.piece.decode("utf-8", "replace") for one in found.tokens] if asked.return_token_strs else None
        longest = await self._longest(found.model, metadata)
        return as_json({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = decode(await read_body(request), DetokenizeRequest)
        if any(not 0 <= one < 1 << 32 for one in asked.tokens):
            raise bad_request("tokens", "holds a number that is no token id")
        wanted = inference_pb2.DetokenizeRequest(
            model=asked.model, token_ids=asked.tokens, skip_special_tokens=asked.skip_special_tokens
        )
        metadata = metadata_of(request)
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
        given = {name: getattr(asked, name) for name in ("add_generation_prompt", "tools", "chat_template_kwargs")}
        for name, value in given.items():
            if value is not None:
                raise bad_request(name, "goes with messages")
        return inference_pb2.TokenizeRequest(
            model=asked.model, text=asked.prompt or "", add_special_tokens=asked.add_special_tokens
        )
    if asked.add_special_tokens:
        raise unsupported("add_special_tokens", "messages have those of the chat template: leave it out, or send false")
    if asked.continue_final_message:
        raise unsupported("continue_final_message", "this server cannot continue a message: leave it out")
    chat = chat_spec(
        Chat(messages=asked.messages, tools=asked.tools, chat_template_kwargs=asked.chat_template_kwargs)
    ).chat
    if asked.add_generation_prompt is not None:
        chat.add_generation_prompt = asked.add_generation_prompt
    return inference_pb2.TokenizeRequest(model=asked.model, chat=chat)
