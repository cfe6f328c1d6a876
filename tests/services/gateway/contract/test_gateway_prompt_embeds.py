"""Prompt embeddings of a generation: what becomes work, and what cannot go with them."""

import dataclasses
import struct
from typing import Any

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.services.gateway.contract.translate import generation, opening
from sluice_server.services.messages.work import Generate, TokenPrompt, pack_ids
from tests.services.gateway.fake_ring import settings

WIDTH = 2
ROWS = struct.pack("<6f", *range(6))
ON = settings(limits=dataclasses.replace(settings().limits, embeds_width=WIDTH))


def asked(**fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # of any field
    sampling = types_pb2.SamplingParams(max_tokens=5, **fields.pop("sampling", {}))
    spec = types_pb2.GenerationSpec(sampling=sampling, **fields)
    spec.prompt_embeds.values, spec.prompt_embeds.num_tokens = ROWS, 3
    spec.prompt_embeds.dtype = types_pb2.EMBEDS_TYPE_FLOAT32
    return spec


@pytest.mark.parametrize("ids", [[], [4, 5]])
def test_embeddings_count_as_tokens_ahead_of_ids(ids: list[int]) -> None:
    made = generation(asked(token_ids={"ids": ids}) if ids else asked(), 0, ON)
    assert isinstance(made.work, Generate)
    assert made.work.embeds == PromptEmbeds(ROWS, EmbedsType.FLOAT32, 3)
    assert made.work.prompt == TokenPrompt(pack_ids(ids)) and made.reserve == 3 + len(ids) + 5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "a"}, "text"),
        ({"chat": {"messages": [{"role": 3, "parts": [{"text": "a"}]}]}}, "chat"),
        ({"output": {"echo": True}}, "output.echo"),
        ({"output": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"sampling": {"repetition_penalty": 1.5}}, "repetition_penalty"),
    ],
)
def test_what_reads_the_prompts_ids_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ServiceError) as caught:
        generation(asked(**fields), 0, ON)
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, named)


def test_an_open_input_is_refused_by_name() -> None:
    with pytest.raises(ServiceError) as caught:
        opening(inference_pb2.Open(spec=asked(), keep_input_open=True), 0, ON)
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "keep_input_open")


def test_a_server_without_the_option_refuses_them_by_name() -> None:
    with pytest.raises(ServiceError) as caught:
        generation(asked(), 0, settings())
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "prompt_embeds")
