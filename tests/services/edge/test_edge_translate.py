from typing import Any, get_args

import msgspec
import pytest
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.translate import chat_spec, completion_specs
from sluice_server.services.edge.wire import ChatRequest, CompletionRequest, decode

FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
MESSAGES = [{"role": "user", "content": "a"}]


def completion(**fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # any field of a request
    body = msgspec.json.encode({"model": "m", "prompt": "a", **fields})
    (spec,) = completion_specs(decode(body, CompletionRequest))
    return spec


def chat(**fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # any field of a request
    return chat_spec(decode(msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields}), ChatRequest))


def test_what_the_contract_has_too_is_a_number_of_its_type() -> None:
    for field in msgspec.structs.fields(CompletionRequest):
        if field.name in FIELDS and field.name != "logit_bias":
            found = FIELDS[field.name]
            kind = float if found.cpp_type == found.CPPTYPE_DOUBLE else int
            assert set(get_args(field.type)) == {kind, type(None)}, field.name


def test_what_the_contract_has_too_arrives() -> None:
    asked = {one.name: 1 for one in msgspec.structs.fields(CompletionRequest) if one.name in FIELDS}
    asked.pop("logit_bias")
    assert {"temperature", "top_k", "best_of", "min_tokens"} <= asked.keys()
    found = {field.name: value for field, value in completion(**asked).sampling.ListFields()}
    assert found == asked
    asked.pop("best_of")
    found = {field.name: value for field, value in chat(**asked).sampling.ListFields()}
    assert found == asked


def test_what_is_absent_stays_absent() -> None:
    assert not chat(temperature=None).sampling.ListFields()
    assert [field.name for field, _ in completion().sampling.ListFields()] == ["max_tokens"]
    assert chat(max_completion_tokens=7).sampling == types_pb2.SamplingParams(max_tokens=7)


def test_what_is_written_otherwise() -> None:
    sampling = chat(seed=-1, logit_bias={"5": -1.5}).sampling
    assert (sampling.seed, dict(sampling.logit_bias)) == (2**64 - 1, {5: -1.5})
    with pytest.raises(EdgeError, match="'x' is not a token id"):
        chat(logit_bias={"x": 1})


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "top_k", "best_of", "logprobs"])
def test_a_number_that_its_field_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(EdgeError, match="a number has a value that its field cannot hold"):
        completion(**{name: -1})
