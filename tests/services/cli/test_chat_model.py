"""What a chat sends and says where its user gave nothing."""

import dataclasses
from typing import Any

import pytest
from sluice.v1 import control_pb2

from sluice_server.engine.request import SamplingParams
from sluice_server.services.cli.chat_model import defaults_for, header
from sluice_server.services.gateway.contract.parameters import model_defaults


def model(context: int = 8192, **defaults: Any) -> control_pb2.Model:  # noqa: ANN401 # numbers of either type
    told = model_defaults(dataclasses.replace(SamplingParams(), **defaults))
    return control_pb2.Model(id="m", context_length=context, vocab_size=9, defaults=told)


def test_a_model_that_names_no_parameters_gets_those_of_the_chat() -> None:
    assert defaults_for(model()) == {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize("own", [{"temperature": 0.6, "top_k": 20}, {"temperature": 0.0}, {"repetition_penalty": 1.05}])
def test_the_parameters_of_a_model_are_left_to_its_server(own: dict[str, Any]) -> None:
    assert defaults_for(model(**own)) == {"max_tokens": 1024}


def test_half_of_a_small_context_is_left_for_questions() -> None:
    assert defaults_for(model(context=100))["max_tokens"] == 50
    assert defaults_for(model(context=1))["max_tokens"] == 1


@pytest.mark.parametrize(
    ("own", "given", "said"),
    [
        ({}, {}, "at most 1,024; temperature 0.7, top_p 0.9 (as the model names none)"),
        ({}, {"temperature": 1.2}, "temperature 1.2, top_p 0.9 (as the model names none)"),
        ({}, {"temperature": 0.0}, "; temperature 0"),
        ({"temperature": 0.6, "top_k": 20}, {}, "; temperature 0.6, top_k 20 (of its generation_config.json)"),
        ({"temperature": 0.6, "top_k": 20}, {"top_k": 5}, "; top_k 5, temperature 0.6 (of its generation_config.json)"),
        ({}, {"max_tokens": 7, "temperature": 0.0, "seed": 2**40}, "at most 7; temperature 0, seed 1099511627776"),
    ],
)
def test_the_header_says_what_holds_and_where_it_is_from(
    own: dict[str, Any], given: dict[str, float], said: str
) -> None:
    line = header(model(**own), given)
    assert line.startswith("m: context 8,192 tokens, answers of ") and line.endswith(said)
