"""The table of fields: what OpenAI publishes, paths of the contract, neutral values and those that are refused."""

import inspect
from typing import Any

import msgspec
import openai.types
import openai.types.chat
import pytest
from openai.types import chat as openai_chat
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.field_table import ROWS
from sluice_server.services.edge.fields import CHAT, COMPLETION, Label, Own, Sent, Unbuilt, field_at
from sluice_server.services.edge.translate import chat_spec, completion_specs
from sluice_server.services.edge.wire import ChatRequest, CompletionRequest, decode, rows_of

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETION: {"prompt": "a"},
}
PUBLISHED: dict[str, type] = {
    CHAT: openai_chat.completion_create_params.CompletionCreateParamsNonStreaming,
    COMPLETION: openai.types.completion_create_params.CompletionCreateParamsNonStreaming,
}
LABELS: dict[object, object] = {str: "x", int: 1, dict[str, Any]: {"a": "b"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temprature": 1}, "temprature: Object contains unknown field `temprature`; is temperature meant?"),
        ({"zzz": 1}, "zzz: Object contains unknown field `zzz`"),
        ({"stream_options": {"include_usge": 1}}, "include_usage meant"),
        ({"messages": [{"role": "usr"}]}, "it is one of assistant, developer, system, tool, user"),
        ({"tool_choice": "must"}, "it is one of auto, none, required"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "it is one of text, refusal, image_url"),
        ({"response_format": {"type": "xml"}}, "it is one of json_object, json_schema, text"),
    ],
)
def test_a_wrong_name_or_value_is_told_with_those_that_are_taken(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EdgeError) as caught:
        decode(msgspec.json.encode({**BODIES[CHAT], **fields}), ChatRequest)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty"),
        (b'{"prompt":', "Input data was truncated"),
        (b'{"prompt": "x",}', "trailing comma in object (byte 15)"),
        (b'{"top_p": NaN}', "invalid character (byte 10)"),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 0"),
    ],
)
def test_a_body_that_is_no_json_is_told_with_the_place(body: bytes, said: str) -> None:
    with pytest.raises(EdgeError) as caught:
        decode(body, CompletionRequest)
    assert caught.value.message.startswith(f"the body is not valid JSON in UTF-8: {said}")


def spec(route: str, **fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # any field of a request
    body = msgspec.json.encode({**BODIES[route], **fields})
    if route == CHAT:
        return chat_spec(decode(body, ChatRequest))
    (made,) = completion_specs(decode(body, CompletionRequest))
    return made


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_what_openai_publishes_is_taken_as_null(route: str) -> None:
    names = inspect.get_annotations(PUBLISHED[route]).keys() | {"stream"}
    for parent in PUBLISHED[route].__mro__:
        names |= inspect.get_annotations(parent).keys()
    names -= BODIES[route].keys()
    assert {"seed", "user", "stream_options"} <= names
    assert spec(route, **dict.fromkeys(names)) == spec(route)


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_each_row_is_a_field_and_each_field_a_row(route: str) -> None:
    rows = [row.name for row in rows_of(route)]
    kind = ChatRequest if route == CHAT else CompletionRequest
    assert sorted(rows) == sorted(one.name for one in msgspec.structs.fields(kind))


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Sent)], ids=lambda row: row.name)
def test_paths_are_fields_of_the_contract(row: Sent) -> None:
    field = field_at(row.path)
    assert row.path.endswith(field.name) and field.full_name.startswith("sluice.v1.")


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Label)], ids=lambda row: row.name)
def test_a_label_has_no_effect(row: Label) -> None:
    for route in row.routes:
        assert spec(route, **{row.name: LABELS[row.kind]}) == spec(route)


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Unbuilt)], ids=lambda row: row.name)
def test_what_is_not_built_is_taken_where_it_asks_for_nothing_and_else_refused(row: Unbuilt) -> None:
    samples: dict[object, object] = {str: "other", int: 7, float: 7.5, list[str]: ["other"], dict[str, Any]: {"a": 1}}
    other = not row.neutral[0] if row.kind is bool else samples.get(row.kind, ["other"])
    for route in row.routes:
        for neutral in (None, *row.neutral):
            assert spec(route, **{row.name: neutral}) == spec(route)
        with pytest.raises(EdgeError) as caught:
            spec(route, **{row.name: other})
        assert (caught.value.param, caught.value.code, caught.value.status) == (row.name, "unsupported_parameter", 400)


def test_what_the_contract_has_under_the_same_name_is_a_number_of_its_type() -> None:
    found = 0
    for row in ROWS:
        if isinstance(row, Sent) and row.path == f"sampling.{row.name}" and row.kind in (int, float):
            field = field_at(row.path)
            assert row.kind is (float if field.cpp_type == field.CPPTYPE_DOUBLE else int), row.name
            found += 1
    assert found >= 13


def test_what_an_own_row_names_is_read() -> None:
    own = {row.name for row in ROWS if isinstance(row, Own)}
    assert {"messages", "prompt", "echo", "tools", "logprobs"} <= own


def test_two_fields_of_one_path_must_agree() -> None:
    assert spec(CHAT, max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    with pytest.raises(EdgeError, match=r"^max_completion_tokens: says something else than max_tokens"):
        spec(CHAT, max_tokens=5, max_completion_tokens=6)
    with pytest.raises(EdgeError, match=r"^regex: says something else than guided_regex"):
        spec(COMPLETION, guided_regex="a", regex="b")


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "top_k", "best_of", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-2, 1 << 32])
def test_a_number_that_its_field_cannot_carry_is_refused(name: str, value: int) -> None:
    with pytest.raises(EdgeError, match=rf"^{name}: {value} is not in \[0, 4294967295\]"):
        spec(COMPLETION, **{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_so_is_an_id(name: str) -> None:
    with pytest.raises(EdgeError, match=rf"^{name}: -1 is not in"):
        spec(COMPLETION, **{name: [3, -1]})
    with pytest.raises(EdgeError, match=r"^logit_bias: 4294967296 is not in"):
        spec(COMPLETION, logit_bias={"4294967296": 1})
