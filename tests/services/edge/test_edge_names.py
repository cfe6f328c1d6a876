"""Errors over HTTP name the field that the client wrote: a bad value of every field of the table, on every route."""

import re
from typing import Any

import httpx2
import pytest

from sluice_server.services.edge.errors import bad_request
from sluice_server.services.edge.fields import CHAT, COMPLETION, Label, Own, Sent, Unbuilt
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.wire import rows_of
from tests.services.edge.edge_rig import EdgeRig, edge
from tests.services.gateway.contract.test_gateway_classification import ONE

Body = dict[str, Any]
ASK: Body = {"role": "user", "content": "a"}
SAID: Body = {"role": "assistant", "content": "b"}
PATHS = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions"}
BODIES: dict[str, Body] = {CHAT: {"messages": [ASK]}, COMPLETION: {"prompt": "a"}}
OF_CONTRACT = re.compile(r"\b(sampling|stop|output|chat|constraint|scheduling)\.|\b(inputs|pairs)\[|template_var")
LONG_REGEX, LARGE = "a" * (16 << 10) + "a", {"a": "x" * (64 << 10)}
DEEP: Body = {"a": [[[[[[[[1]]]]]]]]}


def call(**function: Any) -> Body:  # noqa: ANN401 # any field
    return {"messages": [{**SAID, "tool_calls": [{"id": "c", "function": {"name": "f", **function}}]}]}


def tool(**function: Any) -> Body:  # noqa: ANN401 # any field
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


# Values of the field's type that the gateway refuses: further fields of the body, and the name in the error.
OF_BOTH: dict[str, list[tuple[Body, str]]] = {
    "max_tokens": [({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 5000}, "max_tokens")],
    "temperature": [({"temperature": -1}, "temperature")],
    "top_p": [({"top_p": 2}, "top_p")],
    "n": [({"n": 0}, "n"), ({"n": 129}, "n"), ({"use_beam_search": True, "n": 33}, "n")],
    "best_of": [({"best_of": 129}, "best_of"), ({"use_beam_search": True, "n": 2, "best_of": 33}, "best_of")],
    "presence_penalty": [({"presence_penalty": 9}, "presence_penalty")],
    "frequency_penalty": [({"frequency_penalty": 9}, "frequency_penalty")],
    "logit_bias": [({"logit_bias": {"1": 999}}, "logit_bias"), ({"logit_bias": {"9999": 1}}, "logit_bias")],
    "stop": [({"stop": ["x"] * 99}, "stop"), ({"stop": ["x", ""]}, "stop[1]"), ({"stop": "x" * 999}, "stop")],
    "response_format": [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}}, "response_format")
    ],
    "top_k": [({"top_k": 1 << 31}, "top_k")],
    "min_p": [({"min_p": 2}, "min_p")],
    "typical_p": [({"typical_p": 2}, "typical_p")],
    "repetition_penalty": [({"repetition_penalty": 0}, "repetition_penalty")],
    "min_tokens": [({"min_tokens": 5000}, "min_tokens")],
    "n_predict": [({"n_predict": 0}, "n_predict"), ({"n_predict": 5000}, "n_predict")],
    "stop_token_ids": [({"stop_token_ids": [1, 9999]}, "stop_token_ids[1]")],
    "ignore_eos": [({"ignore_eos": True, "regex": "a"}, "ignore_eos")],
    "allowed_token_ids": [({"allowed_token_ids": [1, 9999]}, "allowed_token_ids[1]")],
    "bad_token_ids": [({"bad_token_ids": [1, 9999]}, "bad_token_ids[1]")],
    "bad_words": [({"bad_words": ["a", ""]}, "bad_words[1]"), ({"bad_words": ["a"] * 99}, "bad_words")],
    "logprob_token_ids": [({"logprob_token_ids": [1]}, "logprob_token_ids")],
    "use_beam_search": [({"use_beam_search": True, "n": 2, "presence_penalty": 1}, "use_beam_search")],
    "length_penalty": [({"use_beam_search": True, "n": 2, "length_penalty": 99}, "length_penalty")],
    "structured_outputs": [({"structured_outputs": {"regex": LONG_REGEX}}, "structured_outputs")],
    "guided_json": [({"guided_json": LARGE}, "guided_json")],
    "json_schema": [({"json_schema": LARGE}, "json_schema")],
    "guided_regex": [({"guided_regex": LONG_REGEX}, "guided_regex")],
    "regex": [({"regex": LONG_REGEX}, "regex"), ({"regex": "a", "use_beam_search": True, "n": 2}, "regex")],
    "guided_grammar": [({"guided_grammar": LONG_REGEX * 5}, "guided_grammar")],
    "ebnf": [({"ebnf": LONG_REGEX * 5}, "ebnf")],
    "grammar": [({"grammar": LONG_REGEX * 5}, "grammar")],
    "guided_choice": [({"guided_choice": ["a", ""]}, "guided_choice[1]"), ({"guided_choice": []}, "guided_choice")],
    "truncate_prompt_tokens": [({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens")],
    "prompt_logprobs": [({"prompt_logprobs": 99}, "prompt_logprobs")],
    "priority": [({"priority": 9999}, "priority")],
    "stream_interval": [({"stream_interval": 0, "stream": True}, "stream_interval")],
}
OF_CHATS: dict[str, list[tuple[Body, str]]] = {
    "messages": [
        ({"messages": []}, "messages"),
        ({"messages": [ASK] * 5000}, "messages"),
        ({"messages": [ASK, {**ASK, "content": []}]}, "messages[1].content"),
        ({"messages": [ASK, {**ASK, "content": "x" * (2 << 20)}]}, "messages"),
        ({"messages": [{**ASK, "name": "x" * 99}]}, "messages[0].name"),
        ({"messages": [{**ASK, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**ASK, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        (call(name="a b"), "messages[0].tool_calls[0].function.name"),
        (call(arguments="7"), "messages[0].tool_calls[0].function.arguments"),
    ],
    "max_completion_tokens": [({"max_completion_tokens": 0}, "max_completion_tokens")],
    "top_logprobs": [({"logprobs": True, "top_logprobs": 99}, "top_logprobs")],
    "tools": [
        (tool(name="a b"), "tools[0].function.name"),
        (tool(description="x" * (17 << 10)), "tools[0].function.description"),
        (tool(parameters=LARGE), "tools[0].function.parameters"),
        ({"tools": tool()["tools"] * 200}, "tools"),
    ],
    "tool_choice": [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {**tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
    ],
    "reasoning_effort": [({"reasoning_effort": "x" * (17 << 10)}, "reasoning_effort")],
    "add_generation_prompt": [
        (
            {"messages": [ASK, SAID], "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        )
    ],
    "continue_final_message": [({"continue_final_message": True}, "continue_final_message")],
    "chat_template_kwargs": [
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": LARGE, "reasoning_effort": "low"}, "chat_template_kwargs"),
    ],
    "chat_template": [({"chat_template": "x"}, "chat_template")],
    "documents": [({"documents": [{}, DEEP]}, "documents[1]"), ({"documents": [{}] * 300}, "documents")],
}
OF_COMPLETIONS: dict[str, list[tuple[Body, str]]] = {
    "prompt": [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * (2 << 20)}, "prompt"),
        ({"prompt": [1, 9999]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], [1, 9999]]}, "prompt[1][1]"),
    ],
    "logprobs": [({"logprobs": 99}, "logprobs"), ({"logprobs": 99, "echo": True}, "logprobs")],
}
CASES = [
    *((route, body, name) for route in PATHS for cases in OF_BOTH.values() for body, name in cases),
    *((CHAT, body, name) for cases in OF_CHATS.values() for body, name in cases),
    *((COMPLETION, body, name) for cases in OF_COMPLETIONS.values() for body, name in cases),
]
# Every value of their type is taken, or the field has a place of its own in an error.
ALL_ARE_TAKEN = {"seed", "cache_salt", "extra_key", "model", "stream_options"}


async def answered(rig: EdgeRig, path: str, body: Body) -> Body:
    async with httpx2.AsyncClient(verify=False, timeout=60) as client:  # plain HTTP: certificates are read for nothing
        found = await client.post(rig.url + path, json=body)
    assert found.status_code == 400, found.text
    error: Body = found.json()["error"]
    return error


def test_every_field_has_a_bad_value() -> None:
    tables = {CHAT: OF_BOTH | OF_CHATS, COMPLETION: OF_BOTH | OF_COMPLETIONS}
    for route, table in tables.items():
        checked = {row.name for row in rows_of(route) if isinstance(row, Sent | Own) and row.kind is not bool}
        assert checked - table.keys() == ALL_ARE_TAKEN & checked
        assert table.keys() <= {row.name for row in rows_of(route)}


@pytest.mark.parametrize("route", list(PATHS))
async def test_what_the_gateway_refuses_has_the_clients_name(route: str) -> None:
    wrong = []
    async with edge() as rig:
        for body, name in [(body, name) for of, body, name in CASES if of == route]:
            error = await answered(rig, PATHS[route], {**BODIES[route], **body})
            message = str(error["message"])
            if error["param"] != name or not message.startswith(name) or OF_CONTRACT.search(message):
                wrong.append((str(body)[:100], name, error["param"], message[:200]))
    assert not wrong


WRONG: dict[object, object] = {str: 5, bool: "x", int: "x", float: "x", list: 5, dict: 5}


@pytest.mark.parametrize("route", list(PATHS))
async def test_a_value_of_another_type_has_the_clients_name(route: str) -> None:
    rejected = 0
    async with edge() as rig:
        for row in rows_of(route):
            wrong = WRONG.get(getattr(row.kind, "__origin__", row.kind), 7.5)
            if row.kind is Any and (isinstance(row, Label | Sent | Own) or wrong in row.neutral):
                continue  # it takes all types
            error = await answered(rig, PATHS[route], {**BODIES[route], row.name: wrong})
            assert error["param"] == row.name, error
            assert isinstance(row, Unbuilt) or error["code"] is None, row.name
            rejected += 1
    assert rejected > 80, rejected


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [1, 9999]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [1, 9999]]}, "input[1][1]"),
        ("/v1/embeddings", {"input": ["a"] * 3000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 999}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "instruction": "x" * 9000}, "instruction"),
        ("/classify", {"input": ["a", ""]}, "input[1]"),
        ("/classify", {"input": []}, "input"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/score", {"text_1": "a", "text_2": "b" * (2 << 20)}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/tokenize", {"prompt": "x" * (2 << 20)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [ASK], "documents": [DEEP]}, "documents[0]"),
        ("/tokenize", {"messages": [ASK], "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [ASK], **tool(name="a b")}, "tools[0].function.name"),
        ("/detokenize", {"tokens": [1, 9999]}, "tokens[1]"),
    ],
)
async def test_so_it_is_on_every_route(path: str, body: Body, name: str) -> None:
    async with edge(ONE) as rig:
        error = await answered(rig, path, body)
        assert error["param"] == name, error
        assert str(error["message"]).startswith(name) and not OF_CONTRACT.search(error["message"]), error


def test_a_text_is_changed_at_paths_alone() -> None:
    names = FieldNames({"stop": "halt", "chat.tools": "tools[].*", "chat.messages.parts": "messages[].content[]"})
    assert names.within("stop: has chat.tools[2].name, 'chat.tools.x', stop and v1.2", "stop") == (
        "halt: has tools[2].name, 'chat.tools.x', stop and v1.2"
    )
    assert names.within("stopped", "stop") == "stopped" and names.within("", "stop") == ""
    assert names.of("chat.messages[3].parts") == "messages[3].content" and names.of("made.up[1]") == "made.up[1]"
    assert bad_request("a", "b").message == "a: b"
