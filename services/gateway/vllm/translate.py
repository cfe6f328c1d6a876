"""Translates requests of `vllm.grpc.engine` to specs of sluice.v1. Pure.

What is not built is refused with INVALID_ARGUMENT that names the field: SMG answers its client 400 with that text.
"""

from typing import Any

from google.protobuf.message import Message
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm

MAX_ID_BYTES = 256
MAX_SEED = 1 << 64
# Fields without a counterpart here. Neutral values of `bool` and of numbers are absent from `ListFields`.
NOT_BUILT = frozenset(
    {
        "mm_inputs",
        "extra_mm_inputs",
        "media_refs",
        "kv_transfer_params",
        "kv_transfer_params_json",
        "sampling_params.structural_tag",
    }
)
# Fields of `SamplingParams` whose zero is a value. Of top_p and repetition_penalty zero is no value, so it is absence.
ZERO_COUNTS = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens")
ZERO_IS_ABSENT = ("top_p", "repetition_penalty", "n")


def spec_of(request: vllm.GenerateRequest) -> types_pb2.GenerationSpec:
    """Translates a request. Raises `ServiceError`."""
    _check_id(request.request_id)
    _refuse_unbuilt(request, "")
    _refuse_unbuilt(request.sampling_params, "sampling_params.")
    if request.data_parallel_rank:
        raise invalid("data_parallel_rank", f"{request.data_parallel_rank}: this worker has the rank 0 only")
    asked = request.sampling_params
    _check_negative(asked)
    spec = types_pb2.GenerationSpec(
        sampling=_sampling(asked),
        stop=_stop(asked),
        output=_output(asked),
        constraint=_constraint(asked),
        **_present(asked, "truncate_prompt_tokens"),
    )
    match request.WhichOneof("input"):
        case "tokenized":
            spec.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            spec.text = request.text
        case _:
            raise invalid("input", "is missing: send tokenized or text")
    return spec


def inputs_of(request: vllm.EmbedRequest) -> inference_pb2.EmbedRequest:
    """Translates a request for a vector. Raises `ServiceError`."""
    _check_id(request.request_id)
    if not request.HasField("tokenized"):
        raise invalid("tokenized", "is missing")
    ids = types_pb2.TokenIds(ids=request.tokenized.input_ids)
    return inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(token_ids=ids)])


def _check_id(request_id: str) -> None:
    if len(request_id.encode()) > MAX_ID_BYTES:
        raise invalid("request_id", f"has more than {MAX_ID_BYTES} bytes")


def _refuse_unbuilt(message: Message, path: str) -> None:
    for field, _ in message.ListFields():
        if path + field.name in NOT_BUILT:
            raise invalid(path + field.name, "is not supported by this server: leave it out")


def _check_negative(asked: vllm.SamplingParams) -> None:
    """Raises `ServiceError` for a negative number where vLLM gives it a meaning of its own, or none."""
    for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        value: int = getattr(asked, name)
        if value < 0:
            raise invalid(f"sampling_params.{name}", f"{value} is below 0: give the number")
    if any(token_id < 0 for token_id in asked.logit_bias):
        raise invalid("sampling_params.logit_bias", f"{min(asked.logit_bias)} is no token id")


def _present(asked: vllm.SamplingParams, *names: str) -> dict[str, Any]:
    """Returns the fields that are set, of those with presence."""
    return {field.name: value for field, value in asked.ListFields() if field.name in names}


def _sampling(asked: vllm.SamplingParams) -> types_pb2.SamplingParams:
    given = {name: getattr(asked, name) for name in ZERO_COUNTS}
    given |= _present(asked, *ZERO_IS_ABSENT, "max_tokens", "temperature")
    return types_pb2.SamplingParams(
        **given,
        seed=asked.seed % MAX_SEED if asked.HasField("seed") else None,  # vLLM's seed is signed
        logit_bias=dict(asked.logit_bias),
    )


def _stop(asked: vllm.SamplingParams) -> types_pb2.StopConditions:
    return types_pb2.StopConditions(
        strings=asked.stop,
        token_ids=asked.stop_token_ids,
        include=asked.include_stop_str_in_output if asked.stop else None,
        ignore_eos=asked.ignore_eos,
    )


def _output(asked: vllm.SamplingParams) -> types_pb2.OutputOptions:
    return types_pb2.OutputOptions(
        **_present(asked, "logprobs", "prompt_logprobs"),
        skip_special_tokens=asked.skip_special_tokens,
    )


def _constraint(asked: vllm.SamplingParams) -> types_pb2.Constraint | None:
    match asked.WhichOneof("constraint"):
        case "json_schema":
            return types_pb2.Constraint(json_schema=asked.json_schema)
        case "regex":
            return types_pb2.Constraint(regex=asked.regex)
        case "grammar":
            return types_pb2.Constraint(grammar=asked.grammar)
        case "json_object" if asked.json_object:
            return types_pb2.Constraint(json_object=types_pb2.JsonObject())
        case "choice":
            return types_pb2.Constraint(choice=types_pb2.Choice(texts=asked.choice.choices))
        case _:
            return None
