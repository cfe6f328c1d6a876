"""Parameters of a generation: everything in the contract, under one name each."""

import dataclasses
from typing import Any

import pytest
from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract.fields import BUILT
from sluice_server.services.offline.params import PATHS, SamplingParams, fill, params_of

PROMPT = ("model", "revision", "text", "token_ids", "prompt_embeds", "chat", "add_special_tokens")
# Of servers, streams and connections, which there are none of; and what results tell in any case.
ELSEWHERE = (
    "adapter",
    "credit_window",
    "idempotency_key",
    "output.echo",
    "output.stream_interval",
    "output.tool_call_parts",
    "output.token_records",
    "resume",
    "scheduling.detach_ttl",
    "scheduling.on_disconnect",
    "scheduling.ttft_target",
)


def filled(**given: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # each of its field's type
    spec = types_pb2.GenerationSpec()
    fill(spec, SamplingParams(**given))
    return spec


def test_every_field_of_the_contract_is_a_parameter_or_said_not_to_be() -> None:
    above = {path[:at] for path in PATHS.values() for at, char in enumerate(path) if char == "."}
    below = {name for name in BUILT if any(name.startswith(f"{path}.") for path in PATHS.values())}  # map entries
    others = {name for name in BUILT if any(name == one or name.startswith(f"{one}.") for one in PROMPT + ELSEWHERE)}
    assert above | below | others | set(PATHS.values()) == BUILT
    assert not others & set(PATHS.values())


def test_what_is_not_given_stays_absent() -> None:
    assert filled() == types_pb2.GenerationSpec()
    assert filled(max_tokens=0).sampling.HasField("max_tokens")


def test_each_kind_of_value() -> None:
    spec = filled(
        temperature=0,
        logit_bias={3: 1.5},
        stop="end",
        bad_words=("a", "b"),
        stop_token_ids=[4],
        beam_width=2,
        json_schema={"type": "object"},
        ignore_eos=True,
    )
    want = types_pb2.GenerationSpec(
        sampling=types_pb2.SamplingParams(
            temperature=0.0, logit_bias={3: 1.5}, bad_words=["a", "b"], beam=types_pb2.BeamSearch(width=2)
        ),
        stop=types_pb2.StopConditions(strings=["end"], token_ids=[4], ignore_eos=True),
        constraint=types_pb2.Constraint(json_schema='{"type":"object"}'),
    )
    assert spec == want
    assert filled(json_schema="{}", json_object=False).constraint.json_schema == "{}"
    assert filled(json_object=True).constraint.WhichOneof("form") == "json_object"
    (call,) = filled(logits_processors={"a": {"b": "c"}}).sampling.logits_processors
    assert (call.name, dict(call.arguments)) == ("a", {"b": "c"})
    assert filled(choices=["a"]).constraint.choice.texts == ["a"]


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"stop": [3]}, "stop", r"\[3\]"),
        ({"stop": "\ud800"}, "stop", "surrogate"),
        ({"logit_bias": [3]}, "logit_bias", r"\[3\]"),
        ({"logits_processors": ["a"]}, "logits_processors", r"\['a'\]"),
        ({"logits_processors": {"a": {"b": 3}}}, "logits_processors", r"\{'a': \{'b': 3\}\}"),
        ({"seed": 1 << 64}, "seed", "18446744073709551616"),
        ({"json_schema": {"a": {1j}}}, "json_schema", "1j"),
        ({"regex": "a" * 99, "stop_token_ids": 3}, "stop_token_ids", "3"),
        ({"regex": "a", "choices": ["b"]}, "constraint", "regex and choice exclude each other"),
        ({"json_schema": "{}", "json_object": True}, "constraint", "json_schema and json_object exclude each other"),
    ],
)
def test_what_a_field_cannot_carry_is_refused_by_name(given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ServiceError, match=said) as caught:
        filled(**given)
    assert (caught.value.reason, caught.value.field) == ("INVALID_PARAMETER", field)


def test_a_mapping_is_as_good_and_nothing_else() -> None:
    assert params_of({"seed": 3}) == SamplingParams(seed=3)
    assert params_of(None) == SamplingParams()
    with pytest.raises(TypeError, match=r"'max_token' is no parameter of a generation; did you mean 'max_tokens'\?"):
        params_of({"max_token": 3})
    with pytest.raises(TypeError, match="int is no SamplingParams"):
        params_of(3)  # type: ignore[arg-type] # as a caller without types may
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 3  # type: ignore[misc] # it is frozen
