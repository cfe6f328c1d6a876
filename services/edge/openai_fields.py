"""The rows of `field_table` for the fields that OpenAI publishes."""

from typing import Any

from sluice_server.services.edge import constraints
from sluice_server.services.edge.errors import bad_request
from sluice_server.services.edge.fields import CHATS, COMPLETIONS, OPENAI, VLLM, Label, Own, Row, Sent, Unbuilt, unless
from sluice_server.services.edge.wire_parts import ResponseFormat

_OF_TOOLS = {
    f"chat.tools.{name}": f"tools[].function.{name}" for name in ("name", "description", "parameters", "strict")
}
SEED_MASK = (1 << 64) - 1  # OpenAI's seed is signed
_JSON = dict[str, Any]


def _biases(asked: dict[str, float]) -> dict[int, float]:
    for key in asked:
        if not (key.isascii() and key.isdecimal()):
            raise bad_request("logit_bias", f"{key[:40]!r} is not a token id")
    return {int(key): bias for key, bias in asked.items()}


OPENAIS: tuple[Row, ...] = (
    Sent(name="model", kind=str, origin=OPENAI, path="model", by=unless(""), note="may be left out"),
    Own(
        name="messages",
        kind=list,
        origin=OPENAI,
        routes=CHATS,
        note="the conversation, `chat.messages`",
        names={
            "prompt": "messages",
            "chat": "messages",
            "chat.messages": "messages[].*",
            "chat.messages.parts": "messages[].content[]",
            "chat.messages.parts.image": "messages[].content[].image_url",
            "chat.messages.reasoning": "messages[].reasoning_content",
            "chat.messages.tool_calls": "messages[].tool_calls[].*",
            "chat.messages.tool_calls.name": "messages[].tool_calls[].function.name",
            "chat.messages.tool_calls.arguments": "messages[].tool_calls[].function.arguments",
        },
    ),
    Own(
        name="prompt",
        kind=list,
        origin=OPENAI,
        routes=COMPLETIONS,
        note="`text` or `token_ids`, or a list of them",
        names={"prompt": "prompt", "text": "prompt", "prompt.token_ids": "prompt[]", "token_ids": "prompt[]"},
    ),
    Sent(name="max_tokens", kind=int, origin=OPENAI, path="sampling.max_tokens", note="16 if absent in completions"),
    Sent(name="max_completion_tokens", kind=int, origin=OPENAI, routes=CHATS, path="sampling.max_tokens"),
    Sent(name="temperature", kind=float, origin=OPENAI, path="sampling.temperature"),
    Sent(name="top_p", kind=float, origin=OPENAI, path="sampling.top_p"),
    Sent(name="n", kind=int, origin=OPENAI, path="sampling.n", also=("sampling.beam.width",)),
    Sent(name="best_of", kind=int, origin=OPENAI, path="sampling.best_of", also=("sampling.beam.width",)),
    Sent(name="presence_penalty", kind=float, origin=OPENAI, path="sampling.presence_penalty"),
    Sent(name="frequency_penalty", kind=float, origin=OPENAI, path="sampling.frequency_penalty"),
    Sent(name="logit_bias", kind=dict[str, float], origin=OPENAI, path="sampling.logit_bias", by=_biases),
    Sent(
        name="seed",
        kind=int,
        origin=OPENAI,
        path="sampling.seed",
        by=lambda seed: seed & SEED_MASK,
        note="a negative one is taken modulo 2^64",
    ),
    Sent(
        name="stop",
        kind=str | list[str],
        origin=OPENAI,
        path="stop.strings",
        by=lambda stop: [stop] if isinstance(stop, str) else stop,
    ),
    Own(name="stream", kind=bool, origin=OPENAI, note="server-sent events"),
    Own(name="stream_options", kind=dict, origin=OPENAI, note="`include_usage`, `continuous_usage_stats`"),
    Own(
        name="logprobs",
        kind=bool,
        origin=OPENAI,
        note="`output.logprobs`; in completions a number",
        names={"output.logprobs": "logprobs"},
    ),
    Own(
        name="top_logprobs",
        kind=int,
        origin=OPENAI,
        routes=CHATS,
        note="`output.logprobs`",
        names={"output.logprobs": "top_logprobs"},
    ),
    Own(
        name="echo",
        kind=bool,
        origin=OPENAI,
        routes=COMPLETIONS,
        note="`output.echo`: the prompt before the answer",
        names={"output.echo": "echo"},
    ),
    Unbuilt(name="echo", kind=bool, origin=VLLM, routes=CHATS, neutral=(False,)),
    Unbuilt(name="suffix", kind=str, origin=OPENAI, routes=COMPLETIONS, neutral=("",)),
    Sent(
        name="response_format",
        kind=ResponseFormat,
        origin=OPENAI,
        path="constraint",
        by=constraints.of_response_format,
    ),
    Own(
        name="tools",
        kind=list,
        origin=OPENAI,
        routes=CHATS,
        note="`chat.tools`",
        names={"chat.tools": "tools[].*"} | _OF_TOOLS,
    ),
    Own(
        name="tool_choice",
        kind=str,
        origin=OPENAI,
        routes=CHATS,
        note="`chat.tool_choice`; a named tool is called once",
        names={"chat.tool_choice": "tool_choice", "chat.tool_choice.name": "tool_choice.function.name"},
    ),
    Own(
        name="parallel_tool_calls",
        kind=bool,
        origin=OPENAI,
        routes=CHATS,
        note="`chat.parallel_tool_calls`",
        names={"chat.parallel_tool_calls": "parallel_tool_calls"},
    ),
    Own(
        name="reasoning_effort",
        kind=str,
        origin=OPENAI,
        routes=CHATS,
        note="a variable of the chat template, `chat.template_variables`",
        names={"chat.template_variables": "reasoning_effort"},
    ),
    Unbuilt(name="functions", kind=list, origin=OPENAI, routes=CHATS, neutral=([],), instead="use tools"),
    Unbuilt(
        name="function_call",
        kind=Any,
        origin=OPENAI,
        routes=CHATS,
        neutral=("none", "auto"),
        instead="use tool_choice",
    ),
    Unbuilt(name="audio", kind=_JSON, origin=OPENAI, routes=CHATS),
    Unbuilt(name="modalities", kind=list[str], origin=OPENAI, routes=CHATS, neutral=([], ["text"])),
    Unbuilt(name="moderation", kind=_JSON, origin=OPENAI, routes=CHATS),
    Unbuilt(name="verbosity", kind=str, origin=OPENAI, routes=CHATS, neutral=("medium",)),
    Unbuilt(name="web_search_options", kind=_JSON, origin=OPENAI, routes=CHATS),
    Unbuilt(name="store", kind=bool, origin=OPENAI, neutral=(False,), instead="answers are not stored"),
    Label(name="user", kind=str, origin=OPENAI, note="a label"),
    Label(name="safety_identifier", kind=str, origin=OPENAI, note="a label"),
    Label(name="metadata", kind=_JSON, origin=OPENAI, note="labels"),
    Label(name="service_tier", kind=str, origin=OPENAI, note="a price; there is one class of service"),
    Label(name="prediction", kind=_JSON, origin=OPENAI, note="a hint for speed"),
    Label(name="prompt_cache_key", kind=str, origin=OPENAI, note="a hint for the prefix cache"),
    Label(name="prompt_cache_retention", kind=str, origin=OPENAI, note="a hint for the prefix cache"),
    Label(name="prompt_cache_options", kind=_JSON, origin=OPENAI, note="a hint for the prefix cache"),
)
