import pytest
from sluice.v1 import types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm
from sluice_server.services.gateway.vllm.translate import NOT_BUILT, spec_of

TOKENIZED = vllm.TokenizedInput(input_ids=[1, 2])


def spec(**fields: object) -> types_pb2.GenerationSpec:
    sampling = vllm.SamplingParams(**fields)  # type: ignore[arg-type] # any field of the message
    return spec_of(vllm.GenerateRequest(tokenized=TOKENIZED, sampling_params=sampling))


def test_every_field_arrives() -> None:
    found = spec(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[4],
        skip_special_tokens=True,
        ignore_eos=True,
        n=2,
        logprobs=3,
        prompt_logprobs=1,
        seed=-1,
        include_stop_str_in_output=True,
        logit_bias={7: 1.5},
        truncate_prompt_tokens=5,
        regex="a+",
    )
    sampling = types_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={7: 1.5},
        seed=(1 << 64) - 1,
        n=2,
    )
    assert found == types_pb2.GenerationSpec(
        token_ids=types_pb2.TokenIds(ids=[1, 2]),
        sampling=sampling,
        stop=types_pb2.StopConditions(strings=["x"], token_ids=[4], include=True, ignore_eos=True),
        output=types_pb2.OutputOptions(logprobs=3, prompt_logprobs=1, skip_special_tokens=True),
        constraint=types_pb2.Constraint(regex="a+"),
        truncate_prompt_tokens=5,
    )


def test_zero_is_a_value_only_where_it_can_be_one() -> None:
    sampling = spec().sampling
    absent = ("temperature", "top_p", "repetition_penalty", "n", "seed", "max_tokens")
    assert [name for name in absent if sampling.HasField(name)] == []  # type: ignore[arg-type] # their names
    assert sampling.HasField("top_k") and sampling.top_k == 0
    assert spec(temperature=0.0).sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (vllm.SamplingParams(json_schema="{}"), types_pb2.Constraint(json_schema="{}")),
        (vllm.SamplingParams(grammar="root ::= x"), types_pb2.Constraint(grammar="root ::= x")),
        (vllm.SamplingParams(json_object=True), types_pb2.Constraint(json_object=types_pb2.JsonObject())),
        (vllm.SamplingParams(json_object=False), types_pb2.Constraint()),
        (
            vllm.SamplingParams(choice=vllm.ChoiceConstraint(choices=["a"])),
            types_pb2.Constraint(choice=types_pb2.Choice(texts=["a"])),
        ),
    ],
)
def test_constraints(given: vllm.SamplingParams, expected: types_pb2.Constraint) -> None:
    assert spec_of(vllm.GenerateRequest(text="a", sampling_params=given)).constraint == expected


REFUSED = {
    "mm_inputs": vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs()),
    "extra_mm_inputs": vllm.GenerateRequest(extra_mm_inputs=[vllm.MultimodalInputs()]),
    "media_refs": vllm.GenerateRequest(media_refs=vllm.MediaRefs()),
    "kv_transfer_params": vllm.GenerateRequest(kv_transfer_params=vllm.KvTransferParams()),
    "kv_transfer_params_json": vllm.GenerateRequest(kv_transfer_params_json="{}"),
    "sampling_params.structural_tag": vllm.GenerateRequest(sampling_params=vllm.SamplingParams(structural_tag="x")),
    "data_parallel_rank": vllm.GenerateRequest(data_parallel_rank=1),
    "sampling_params.logprobs": vllm.GenerateRequest(sampling_params=vllm.SamplingParams(logprobs=-1)),
    "sampling_params.prompt_logprobs": vllm.GenerateRequest(sampling_params=vllm.SamplingParams(prompt_logprobs=-1)),
    "sampling_params.truncate_prompt_tokens": vllm.GenerateRequest(
        sampling_params=vllm.SamplingParams(truncate_prompt_tokens=-1)
    ),
    "sampling_params.logit_bias": vllm.GenerateRequest(sampling_params=vllm.SamplingParams(logit_bias={-1: 1.0})),
    "request_id": vllm.GenerateRequest(request_id="x" * 257),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_built_is_refused_by_name(field: str) -> None:
    asked = REFUSED[field]
    asked.tokenized.CopyFrom(TOKENIZED)
    with pytest.raises(ServiceError) as caught:
        spec_of(asked)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)


def test_a_prompt_is_needed() -> None:
    with pytest.raises(ServiceError, match="input: is missing"):
        spec_of(vllm.GenerateRequest())


def test_every_field_of_a_request_is_either_translated_or_refused() -> None:
    """A field that the protocol gains must be put into one of these lists."""
    translated = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
    without_effect = {"spaces_between_special_tokens", "grammar_from_first_token"}  # on ids; always so here
    of_sampling = {field.name for field in vllm.SamplingParams.DESCRIPTOR.fields}
    refused = {name.rpartition(".")[2] for name in NOT_BUILT}
    assert {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields} - refused == translated
    assert len(of_sampling - refused - without_effect) == 25
