"""Converts OpenAI's requests to specs of sluice.v1. Checks what a spec cannot express; the gateway checks the rest."""

import base64
import binascii
from collections.abc import Iterator

import msgspec
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import bad_request, unsupported
from sluice_server.services.edge.wire import (
    ChatRequest,
    ChosenTool,
    Common,
    CompletionRequest,
    Function,
    ImagePart,
    Message,
    ResponseFormat,
    TextPart,
    encode,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
MAX_PROMPTS = 128
SEED_MASK = (1 << 64) - 1  # OpenAI's seed is signed
_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_ROLES = {
    "system": types_pb2.ROLE_SYSTEM,
    "developer": types_pb2.ROLE_DEVELOPER,
    "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT,
    "tool": types_pb2.ROLE_TOOL,
}
_MODES = {
    "none": types_pb2.TOOL_MODE_NONE,
    "auto": types_pb2.TOOL_MODE_AUTO,
    "required": types_pb2.TOOL_MODE_REQUIRED,
}


def chat_spec(request: ChatRequest) -> types_pb2.GenerationSpec:
    """Returns the spec of a chat request. Raises EdgeError."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_request("max_completion_tokens", "is the new name of max_tokens: send one of them")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs", "needs logprobs to be true")
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    messages = [_message(at, one) for at, one in enumerate(request.messages)]
    spec = _spec(request, max_tokens, logprobs)
    if request.tools is not None and not request.tools:
        raise bad_request("tools", "is empty: leave it out")
    if request.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "this server cannot limit a model to one call: leave it out")
    variables = request.chat_template_kwargs
    spec.chat.MergeFrom(
        types_pb2.Chat(
            messages=messages,
            tools=[_tool(at, one.function) for at, one in enumerate(request.tools or ())],
            tool_choice=_tool_choice(request.tool_choice),
            template_variables=None if variables is None else encode("chat_template_kwargs", variables),
        )
    )
    return spec


def completion_specs(request: CompletionRequest) -> list[types_pb2.GenerationSpec]:
    """Returns a spec for each prompt. Raises EdgeError."""
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    made = []
    for prompt in _prompts(request):
        spec = _spec(request, max_tokens, request.logprobs)
        if isinstance(prompt, str):
            spec.text = prompt
        else:
            spec.token_ids.ids.extend(_unsigned("prompt", prompt))
        made.append(spec)
    return made


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Returns the prompts: a text, token ids, or a list of either. Raises EdgeError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(one, int) for one in prompt):
        return [[one for one in prompt if isinstance(one, int)]]
    found = [one for one in prompt if not isinstance(one, int)]
    if len(found) != len(prompt) or not 1 <= len(prompt) <= MAX_PROMPTS:
        raise bad_request("prompt", f"is a text, token ids, or a list of 1 to {MAX_PROMPTS} of one of them")
    return found


def _spec(request: Common, max_tokens: int | None, logprobs: int | None) -> types_pb2.GenerationSpec:
    try:
        return types_pb2.GenerationSpec(
            model=request.model,
            sampling=_sampling(request, max_tokens),
            stop=types_pb2.StopConditions(
                strings=[request.stop] if isinstance(request.stop, str) else request.stop or (),
                token_ids=_unsigned("stop_token_ids", request.stop_token_ids or []),
                ignore_eos=request.ignore_eos,
            ),
            output=types_pb2.OutputOptions(logprobs=logprobs, token_records=logprobs is not None),
            constraint=_constraint(request.response_format),
        )
    except ValueError as error:
        raise bad_request("", f"a number has a value that its field cannot hold: {error}") from None


def _sampling(request: Common, max_tokens: int | None) -> types_pb2.SamplingParams:
    """Copy the fields that have equal names in sluice.v1; seed and logit_bias are converted."""
    given = {name: value for name, value in msgspec.structs.asdict(request).items() if name in _SAMPLING}
    given["max_tokens"] = max_tokens
    if request.seed is not None:
        given["seed"] = request.seed & SEED_MASK
    given["logit_bias"] = _biases(request.logit_bias or {})
    return types_pb2.SamplingParams(**given)


def _biases(asked: dict[str, float]) -> dict[int, float]:
    for key in asked:
        if not (key.isascii() and key.isdecimal()):
            raise bad_request("logit_bias", f"{key[:40]!r} is not a token id")
    return {int(key): bias for key, bias in asked.items()}


def _constraint(asked: ResponseFormat | None) -> types_pb2.Constraint | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return types_pb2.Constraint(json_object=types_pb2.JsonObject())
    if asked.json_schema is None:
        raise bad_request("response_format.json_schema", "is missing")
    return types_pb2.Constraint(json_schema=encode("response_format", asked.json_schema.schema))


def _message(at: int, message: Message) -> types_pb2.ChatMessage:
    calls = message.tool_calls or []
    if message.content is None and not calls:
        raise bad_request(f"messages[{at}].content", "is missing")
    if message.content is None:
        parts = []
    elif isinstance(message.content, str):
        parts = [types_pb2.ContentPart(text=message.content)]
    else:
        parts = list(_parts(f"messages[{at}].content", message.content))
    return types_pb2.ChatMessage(
        role=_ROLES[message.role],
        parts=parts,
        tool_calls=[
            types_pb2.ToolCall(id=one.id, name=one.function.name, arguments=one.function.arguments or "{}")
            for one in calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning_content,
    )


def _tool(at: int, function: Function) -> types_pb2.Tool:
    if function.strict:
        raise unsupported(f"tools[{at}].function.strict", "this server cannot enforce the schema of arguments")
    schema = function.parameters
    parameters = None if schema is None else encode(f"tools[{at}].function.parameters", schema)
    return types_pb2.Tool(name=function.name, description=function.description, parameters=parameters)


def _tool_choice(choice: str | ChosenTool | None) -> types_pb2.ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, ChosenTool):
        return types_pb2.ToolChoice(name=choice.function.name)
    return types_pb2.ToolChoice(mode=_MODES[choice])


def _parts(field: str, parts: list[TextPart | ImagePart]) -> Iterator[types_pb2.ContentPart]:
    for part in parts:
        if isinstance(part, TextPart):
            yield types_pb2.ContentPart(text=part.text)
        else:
            yield types_pb2.ContentPart(image=_image(field, part.image_url.url))


def _image(field: str, url: str) -> types_pb2.Image:
    """Returns an image from a data: URL. Other URLs are never fetched: clients could make the server send requests
    to internal addresses."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise unsupported(field, "an image must come as a data:<type>;base64,<data> URL; others are not fetched")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(field, "the image is not valid base64") from None
    return types_pb2.Image(data=raw, media_type=head.removeprefix("data:").removesuffix(";base64"))


def _unsigned(field: str, ids: list[int]) -> list[int]:
    if any(not 0 <= one < 1 << 32 for one in ids):
        raise bad_request(field, "holds a number that is no token id")
    return ids
