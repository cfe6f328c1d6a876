from typing import Any

import msgspec
import pytest
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.translate import chat_spec, completion_specs
from sluice_server.services.edge.wire import ChatRequest, CompletionRequest, decode

MESSAGES = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object"}


def completion(**fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # any field of a request
    body = msgspec.json.encode({"model": "m", "prompt": "a", **fields})
    (spec,) = completion_specs(decode(body, CompletionRequest))
    return spec


def chat(**fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # any field of a request
    return chat_spec(decode(msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields}), ChatRequest))


def test_what_is_absent_stays_absent() -> None:
    assert not chat(temperature=None).sampling.ListFields()
    assert [field.name for field, _ in completion().sampling.ListFields()] == ["max_tokens"]
    assert chat(max_completion_tokens=7).sampling == types_pb2.SamplingParams(max_tokens=7)
    assert not chat(model=None).HasField("model") and not completion(model="").HasField("model")


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"seed": -1}, "sampling.seed", 2**64 - 1),
        ({"logit_bias": {"5": -1.5}}, "sampling.logit_bias", {5: -1.5}),
        ({"top_k": -1}, "sampling.top_k", 0),
        ({"n_predict": 9}, "sampling.max_tokens", 9),
        ({"n_predict": -1}, "sampling.max_tokens", 0),
        ({"stop": "x"}, "stop.strings", ["x"]),
        ({"stop": ["x"], "include_stop_str_in_output": True}, "stop.include", True),
        ({"stop": "x", "no_stop_trim": True}, "stop.include", True),
        ({"typical_p": 0.5}, "sampling.typical_p", 0.5),
        ({"bad_words": ["no"]}, "sampling.bad_words", ["no"]),
        ({"allowed_token_ids": [3]}, "sampling.allowed_token_ids", [3]),
        ({"priority": -3}, "scheduling.priority", 3),
        ({"cache_salt": "s"}, "cache.bypass", True),
        ({"cache_prompt": False}, "cache.bypass", True),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", 4),
        ({"skip_special_tokens": False}, "output.skip_special_tokens", False),
        ({"stream_interval": 4}, "output.stream_interval", 4),
        ({"add_special_tokens": False}, "add_special_tokens", False),
        ({"prompt_logprobs": 2}, "output.prompt_logprobs", 2),
        ({"echo": True}, "output.echo", True),
        ({"echo": True, "logprobs": 3}, "output.prompt_logprobs", 3),
        ({"echo": True, "max_tokens": 0}, "sampling.max_tokens", 1),
        ({"return_token_ids": True}, "output.token_records", True),
        ({"use_beam_search": True, "n": 3}, "sampling.beam", types_pb2.BeamSearch(width=3)),
        (
            {"use_beam_search": True, "n": 1, "best_of": 4, "length_penalty": 0.5, "early_stopping": True},
            "sampling.beam",
            types_pb2.BeamSearch(width=4, length_penalty=0.5, early_stopping=True),
        ),
        ({"guided_regex": "a+"}, "constraint.regex", "a+"),
        ({"regex": "a+"}, "constraint.regex", "a+"),
        ({"ebnf": "root ::= a"}, "constraint.grammar", "root ::= a"),
        ({"grammar": "root ::= a"}, "constraint.grammar", "root ::= a"),
        ({"guided_json": SCHEMA}, "constraint.json_schema", '{"type":"object"}'),
        ({"json_schema": '{"type": "object"}'}, "constraint.json_schema", '{"type": "object"}'),
        ({"guided_choice": ["a", "b"]}, "constraint.choice.texts", ["a", "b"]),
        ({"structured_outputs": {"choice": ["a"]}}, "constraint.choice.texts", ["a"]),
        ({"structured_outputs": {"json": SCHEMA}}, "constraint.json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json_object": True}}, "constraint.json_object", types_pb2.JsonObject()),
        ({"response_format": {"type": "json_object"}}, "constraint.json_object", types_pb2.JsonObject()),
    ],
    ids=str,
)
def test_where_a_field_goes(fields: dict[str, Any], path: str, value: object) -> None:
    found: Any = completion(**fields)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"grammar": ""},
        {"include_stop_str_in_output": True},
        {"include_stop_str_in_output": False},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
        {"cache_salt": "", "cache_prompt": True},
        {"echo": False, "return_token_ids": False},
        {"stop": []},
    ],
    ids=str,
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(EdgeError) as caught:
        completion(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_of_a_chat() -> None:
    assert chat(best_of=3, n=2).sampling == types_pb2.SamplingParams(best_of=3, n=2)
    assert chat(add_generation_prompt=False).chat.HasField("add_generation_prompt")
    given = chat(continue_final_message=True, documents=[{"a": 1}, {}], chat_template="x", add_special_tokens=True)
    assert given.chat.continue_final_message and not given.chat.HasField("add_generation_prompt")
    assert (list(given.chat.documents), given.chat.template, given.add_special_tokens) == (['{"a":1}', "{}"], "x", True)
    assert chat(documents=[], chat_template="") == chat()
    assert chat(reasoning_effort="low").chat.template_variables == '{"reasoning_effort":"low"}'
    both = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert both.chat.template_variables == '{"enable_thinking":false,"reasoning_effort":"low"}'
    with pytest.raises(EdgeError, match=r"^reasoning_effort: says something else"):
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert chat(top_logprobs=0, logprobs=False) == chat()
    assert chat(tools=[], tool_choice="none").chat.tools == []


def test_ids_are_used_as_they_are() -> None:
    for value in (True, False):
        assert completion(prompt=[5], add_special_tokens=value) == completion(prompt=[5])


def test_one_call_at_a_time() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, parallel_tool_calls=False).chat.HasField("parallel_tool_calls")
    assert not chat(tools=tools).chat.tools[0].HasField("strict")
    (tool,) = chat(tools=[{"type": "function", "function": {"name": "f", "strict": True}}]).chat.tools
    assert tool.strict
    assert not chat(tools=tools, parallel_tool_calls=True).chat.HasField("parallel_tool_calls")
    assert chat(parallel_tool_calls=False) == chat()
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=tools, tool_choice=named).chat.HasField("parallel_tool_calls")
    assert not chat(tools=tools, tool_choice=named, parallel_tool_calls=True).chat.HasField("parallel_tool_calls")
    assert not chat(tools=tools, tool_choice="required").chat.HasField("parallel_tool_calls")


def test_a_stream_that_counts_asks_for_its_prompt() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).output.echo
    assert not chat(stream=True, stream_options={**options, "include_usage": False}).output.HasField("echo")
