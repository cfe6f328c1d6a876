import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.calls.described import FEATURES
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.fields import BUILT, FEATURE_FIELDS, NOT_BUILT, refuse_unbuilt
from sluice_server.services.messages.work import ChatPrompt, Generate, TokenPrompt
from tests.services.gateway.fake_ring import MODEL, SETTINGS, settings, spec

CASES = {
    "sampling.typical_p": {"sampling": {"typical_p": 0.5}},
    "sampling.presence_penalty": {"sampling": {"presence_penalty": 0.1}},
    "sampling.frequency_penalty": {"sampling": {"frequency_penalty": math.nan}},
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 1.1}},
    "sampling.logit_bias": {"sampling": {"logit_bias": {3: 1.0}}},
    "cache.bypass": {"cache": {"bypass": True}},
    "scheduling.ttft_target": {"scheduling": {"ttft_target": {"seconds": 1}}},
}


def paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        name = prefix + field.name
        yield name
        if field.type == FieldDescriptor.TYPE_MESSAGE and name not in NOT_BUILT:
            assert field.message_type is not None
            yield from paths(field.message_type, name + ".")


def test_every_field_of_the_contract_is_built_or_refused() -> None:
    found = set(paths(types_pb2.GenerationSpec.DESCRIPTOR))
    assert found == BUILT | NOT_BUILT.keys()
    assert not BUILT & NOT_BUILT.keys()


@pytest.mark.parametrize("path", NOT_BUILT)
def test_what_is_not_built_is_refused_by_name(path: str) -> None:
    asked = types_pb2.GenerationSpec(**CASES[path])  # type: ignore[arg-type]  # a table of literals
    with pytest.raises(ServiceError) as caught:
        refuse_unbuilt(asked)
    assert (caught.value.code, caught.value.details["feature"]) == (Code.UNIMPLEMENTED, path)


def test_features_are_those_whose_fields_are_built() -> None:
    assert {path for _, path in FEATURE_FIELDS} <= BUILT | NOT_BUILT.keys()
    assert control_pb2.FEATURE_MANY_OUTPUTS in FEATURES and control_pb2.FEATURE_MODEL_LOADING not in FEATURES
    assert len(set(FEATURES)) == len(FEATURES)


def test_neutral_values_are_accepted() -> None:
    neutral = types_pb2.SamplingParams(n=1, best_of=1, typical_p=1.0, presence_penalty=0.0, repetition_penalty=1.0)
    refuse_unbuilt(spec(sampling=neutral, speculation={"enabled": False}, cache={"bypass": False}))
    assert translate.generation(spec(sampling=neutral), 0, SETTINGS).effective is not None


def field_spec(group: str, name: str, value: object) -> types_pb2.GenerationSpec:
    fields: dict[str, Any] = {group: {name: value}}
    return spec("hello", **fields)


def error_of(asked: types_pb2.GenerationSpec) -> str:
    """The field of the error, or "" if the request is accepted."""
    try:
        translate.generation(asked, 0, SETTINGS)
    except ServiceError as error:
        assert error.code == Code.INVALID_ARGUMENT
        return error.field
    return ""


@pytest.mark.parametrize(
    ("group", "name", "good", "bad"),
    [
        ("sampling", "max_tokens", [1, 999, 1000], [0, 1001]),
        ("sampling", "min_tokens", [0, 999, 1000], [1001]),
        ("sampling", "temperature", [0.0, 99.9, 100.0], [-0.1, 100.1, math.nan, math.inf]),
        ("sampling", "top_k", [0, 2**31 - 2, 2**31 - 1], [2**31]),
        ("sampling", "top_p", [0.001, 0.999, 1.0], [0.0, 1.001, math.nan]),
        ("sampling", "min_p", [0.0, 0.5, 1.0], [-0.1, 1.001, math.nan]),
        ("sampling", "seed", [0, 2**64 - 1], []),
        ("sampling", "typical_p", [0.001, 1.0], [0.0, 1.001, math.nan]),
        ("sampling", "presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("sampling", "frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.inf]),
        ("sampling", "repetition_penalty", [0.01, 100.0], [0.0, -1.0, 100.1, math.nan]),
        ("sampling", "logit_bias", [{}, {99: 100.0}, {0: -100.0}], [{100: 1.0}, {1: 100.1}, {1: math.nan}]),
        ("sampling", "allowed_token_ids", [[], [99], list(range(100))], [[100], [1, 1], [1] * 4097]),
        ("sampling", "bad_token_ids", [[], [99], list(range(99))], [[100], [1, 1], [1] * 4097]),
        ("sampling", "bad_words", [[], ["a"] * 64, ["a" * 128]], [["a"] * 65, ["a" * 129], [""], [" "]]),
        ("output", "prompt_logprobs", [0, 20], [21]),
        ("sampling", "n", [1, 2, 128], [0, 129]),
        ("sampling", "best_of", [1, 128], [0, 129]),
        ("sampling", "beam", [{"width": 2}, {"width": 32}], [{}, {"width": 1}, {"width": 33}]),
        ("output", "logprobs", [0, 19, 20], [21]),
        ("scheduling", "priority", [-1000, 999, 1000], [-1001, 1001]),
        ("stop", "strings", [[], ["a" * 255], ["a" * 256], ["a"] * 32], [[""], ["a" * 257], ["é" * 129], ["a"] * 33]),
        ("stop", "token_ids", [[], [99], [1] * 64], [[100], [1] * 65]),
    ],
)
def test_limits(group: str, name: str, good: list[object], bad: list[object]) -> None:
    assert error_of(spec()) == ""
    assert [error_of(field_spec(group, name, value)) for value in good] == [""] * len(good)
    fields = [error_of(field_spec(group, name, value)) for value in bad]
    assert all(name in field.replace("stop_token_ids", "token_ids") for field in fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"min_tokens": 5, "max_tokens": 4}}, "min_tokens"),
        ({"stop": {"include": True}}, "stop.include"),
        ({"stop": {"ignore_eos": True, "token_ids": [5, 2]}}, "stop.token_ids[1]"),
        ({"stop": {"strings": ["x" * 10_000_000]}}, "stop.strings[0]"),
        ({"output": {"split_sections": True}}, "output.split_sections"),
        ({"output": {"logprobs": 0, "token_records": False}}, "output.token_records"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1001}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1000}, ""),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], field: str) -> None:
    assert error_of(spec(**fields)) == field


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("sampling", "allowed_token_ids"),
        ("sampling", "bad_token_ids"),
        ("stop", "token_ids"),
        ("output", "logprob_token_ids"),
    ],
)
def test_sizes_are_looked_at_before_contents(group: str, name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        translate.generation(field_spec(group, name, [99_999] * 100_000), 0, SETTINGS)
    assert name in caught.value.field and "entries that are allowed" in caught.value.message


def test_a_million_biases_are_refused_by_their_number() -> None:
    asked = spec()
    for token in range(1_000_000):
        asked.sampling.logit_bias[token] = 1.0
    with pytest.raises(ServiceError, match="logit_bias: has more than the 1024 entries"):
        translate.generation(asked, 0, SETTINGS)


def test_a_prompt_is_measured_as_it_is_kept() -> None:
    ids = types_pb2.TokenIds(ids=[1] * 2000)
    limit = types_pb2.SamplingParams(max_tokens=100)
    assert error_of(types_pb2.GenerationSpec(token_ids=ids, sampling=limit)) == "prompt"
    kept = types_pb2.GenerationSpec(token_ids=ids, sampling=limit, truncate_prompt_tokens=900)
    asked = translate.generation(kept, 0, SETTINGS)
    assert isinstance(asked.work, Generate) and (asked.work.keep_last, asked.reserve) == (900, 1000)
    kept.truncate_prompt_tokens = 901
    assert error_of(kept) == "prompt"


def test_absent_parameters_take_the_models_defaults_and_are_echoed() -> None:
    asked = translate.generation(spec(), 0, SETTINGS)
    assert isinstance(asked.work, Generate) and asked.effective is not None
    assert asked.effective.sampling.temperature == SETTINGS.model.defaults.temperature
    assert asked.effective.sampling.seed == asked.work.params.seed


@pytest.mark.parametrize("size", [1, 99, 100, 101, 0])
def test_prompt_bytes(size: int) -> None:
    limits = settings(limits=type(SETTINGS.limits)(context_length=1000, vocab_size=100, max_prompt_bytes=100))
    asked = spec(text="x" * size)
    if 1 <= size <= 100:
        assert translate.generation(asked, 0, limits).reserve > 0
        return
    with pytest.raises(ServiceError) as caught:
        translate.generation(asked, 0, limits)
    assert caught.value.field == "prompt"


def test_a_text_that_no_context_holds_is_refused_by_its_bytes() -> None:
    known = settings(model=dataclasses.replace(MODEL, longest_token=10))
    with pytest.raises(ServiceError, match="prompt has 20000 bytes, which are 2000 tokens or more") as caught:
        translate.generation(spec("a" * 20_000), 0, known)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED" and caught.value.details["limit"] == "1000"
    assert translate.generation(spec("a" * 20_000, truncate_prompt_tokens=9), 0, known)
    assert translate.generation(spec("a" * 20_000), 0, settings())  # of this model it is not known


def test_too_many_ids_are_refused_by_their_number() -> None:
    with pytest.raises(ServiceError) as caught:
        translate.generation(types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[10**6] * 5000)), 0, settings())
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_token_prompts_are_checked_and_packed() -> None:
    asked = types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[1, 99]))
    work = translate.generation(asked, 0, SETTINGS).work
    assert isinstance(work, Generate) and work.prompt == TokenPrompt(bytes([1, 0, 0, 0, 99, 0, 0, 0]))
    for ids, field in (([1, 100], "prompt.token_ids[1]"), ([], "prompt"), ([1] * 1000, "prompt")):
        assert error_of(types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=ids))) == field
    assert error_of(types_pb2.GenerationSpec()) == "prompt"


def test_chat_is_joined_and_its_roles_are_known() -> None:
    part = types_pb2.ContentPart(text="a")
    turn = types_pb2.ChatMessage(role=types_pb2.ROLE_USER, parts=[part, part])
    work = translate.generation(types_pb2.GenerationSpec(chat=types_pb2.Chat(messages=[turn])), 0, SETTINGS).work
    assert isinstance(work, Generate) and isinstance(work.prompt, ChatPrompt)
    assert (work.prompt.messages[0].role, work.prompt.messages[0].content) == ("user", "a\na")
    assert work.prompt.add_generation_prompt
    bad: list[tuple[list[types_pb2.ChatMessage], str]] = [
        ([], "chat.messages"),
        ([types_pb2.ChatMessage(parts=[part])], "chat.messages[0].role"),
        ([types_pb2.ChatMessage(role=types_pb2.ROLE_USER)], "chat.messages[0].parts"),
    ]
    for messages, field in bad:
        assert error_of(types_pb2.GenerationSpec(chat=types_pb2.Chat(messages=messages))) == field


def test_every_rpc_input_besides_the_spec_is_small_enough_to_know() -> None:
    known: dict[type[Message], set[str]] = {
        inference_pb2.GenerateRequest: {"spec"},
        inference_pb2.StreamGenerateRequest: {"spec", "joined_events"},
        inference_pb2.CancelGenerationRequest: {"generation_id", "output_index"},
        inference_pb2.TokenizeRequest: {
            *("model", "revision", "text", "chat", "add_special_tokens", "count_only", "offsets"),
        },
        inference_pb2.DetokenizeRequest: {"model", "revision", "token_ids", "skip_special_tokens"},
    }
    for message, names in known.items():
        assert {field.name for field in message.DESCRIPTOR.fields} == names
