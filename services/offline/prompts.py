"""Converts a caller's prompts and chats to GenerationSpecs of the contract. Encodes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.translate import chat_spec
from sluice_server.services.edge.wire import ChatRequest
from sluice_server.services.offline.errors import PromptError, from_edge
from sluice_server.services.offline.params import Given, fill, params_of

BYTES = bytes | bytearray  # sequences of integers, which are no token ids
Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]  # in OpenAI's form
Conversation: TypeAlias = Sequence[Message]
Specs: TypeAlias = list[types_pb2.GenerationSpec]
Adapter: TypeAlias = str | Sequence[str | None] | None  # name for all prompts, or one for each; None: the base


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts, from one or several."""
    if isinstance(given, str | BYTES) or not isinstance(given, Iterable):  # what is neither is refused as one prompt
        return [given]
    found: list[Any] = list(given)
    return [found] if found and all(_is_id(one) for one in found) else found


def conversations_of(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Returns a list of conversations, from one or several."""
    found: list[Any] = list(given)
    return [found] if found and all(isinstance(one, Mapping) for one in found) else found


def each_with(params: Given | Sequence[Given], num: int) -> list[Given]:
    """Returns parameters for each of `num` prompts. Raises ValueError if their number differs."""
    if params is None or isinstance(params, Mapping) or not isinstance(params, Sequence):
        return [params] * num
    if len(params) != num:
        raise ValueError(f"{len(params)} parameters for {num} prompts: give one for all, or one for each")
    return list(params)


def with_adapters(specs: Specs, adapter: Adapter) -> Specs:
    """Returns the specs, which name their adapters then. Raises ValueError if the number of names differs."""
    names = [adapter] * len(specs) if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != len(specs):
        raise ValueError(f"{len(names)} adapters for {len(specs)} prompts: give one for all, or one for each")
    for spec, name in zip(specs, names, strict=True):
        spec.adapter = name or ""
    return specs


def specs_of(prompts: Sequence[Prompt], params: Sequence[Given]) -> Specs:
    """Converts prompts with their parameters. Raises PromptError."""
    return [_at(index, _prompted, *both) for index, both in enumerate(zip(prompts, params, strict=True))]


def chats_of(conversations: Sequence[Conversation], params: Sequence[Given], chat: types_pb2.Chat) -> Specs:
    """Converts conversations with their parameters; `chat` has all fields but the messages. Raises PromptError."""
    both = enumerate(zip(conversations, params, strict=True))
    return [_at(index, _chatted, messages, given, chat) for index, (messages, given) in both]


def chat_options(options: Mapping[str, Any]) -> types_pb2.Chat:
    """Builds a chat without messages from options of `LLM.chat`; None is absent. Raises ServiceError."""
    return _read([], {name: value for name, value in options.items() if value is not None})


def _at(index: int, make: Any, *given: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # one of the two below
    try:
        spec: types_pb2.GenerationSpec = make(*given)
    except ServiceError as error:
        raise PromptError(index, error) from None
    spec.output.echo = True  # results include the prompt's ids
    return spec


def _prompted(prompt: object, params: Given) -> types_pb2.GenerationSpec:
    spec = types_pb2.GenerationSpec()
    try:
        if isinstance(prompt, str):
            spec.text = prompt
        elif isinstance(prompt, Sequence) and not isinstance(prompt, BYTES) and all(_is_id(one) for one in prompt):
            ids: Sequence[int] = prompt
            spec.token_ids.ids.extend(ids)
            spec.token_ids.SetInParent()
        else:
            raise invalid("prompt", f"{type(prompt).__name__} is neither a text nor a sequence of token ids")
    except ValueError as error:  # a lone surrogate, or a number that is not an id
        raise invalid("prompt", str(error)) from None
    fill(spec, params_of(params))
    return spec


def _chatted(messages: Conversation, params: Given, chat: types_pb2.Chat) -> types_pb2.GenerationSpec:
    spec = types_pb2.GenerationSpec(chat=chat)
    spec.chat.messages.extend(_read(messages, {}).messages)
    fill(spec, params_of(params))
    return spec


def _read(messages: Conversation, others: Mapping[str, Any]) -> types_pb2.Chat:
    """Parses a chat in OpenAI's form, as the HTTP edge does."""
    try:
        request = msgspec.convert({"model": "", "messages": list(messages), **others}, ChatRequest)
        return chat_spec(request).chat
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise invalid(path.strip("`") or "messages", text) from None
    except EdgeError as error:
        raise from_edge(error) from None
    except ValueError as error:
        raise invalid("messages", str(error)) from None


def _is_id(one: object) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)
