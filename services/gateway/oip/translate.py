"""Translates requests of the protocol to specs of sluice.v1, with the tensors of Triton's vLLM backend. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from sluice.v1 import types_pb2

from sluice_server.engine.errors import invalid, unsupported
from sluice_server.engine.parameters import CHOICE
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.gateway.oip.tensors import Tensor, read_inputs

VERSION = "1"  # of the model; sluice has revisions instead of versions
MAX_TOKENS = 16  # vLLM's default, where sampling_parameters has none
MAX_ID_BYTES = 256
FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"

TEXT, STREAM = Tensor("text_input", "BYTES"), Tensor("stream", "BOOL")
SAMPLING, EXCLUDE = Tensor("sampling_parameters", "BYTES"), Tensor("exclude_input_in_output", "BOOL")
TEXT_OUTPUT, FINISH_REASON = Tensor("text_output", "BYTES"), Tensor("finish_reason", "BYTES")
NUM_INPUT, NUM_OUTPUT = Tensor("num_input_tokens", "UINT32"), Tensor("num_output_tokens", "UINT32")
EXTRAS = {f"return_{one.name}": one for one in (FINISH_REASON, NUM_INPUT, NUM_OUTPUT)}  # the switch of each
INPUTS = {one.name: one for one in (TEXT, STREAM, SAMPLING, EXCLUDE, *(Tensor(name, "BOOL") for name in EXTRAS))}
OUTPUTS = {one.name: one for one in (TEXT_OUTPUT, *EXTRAS.values())}


@dataclasses.dataclass(frozen=True, slots=True)
class InferRequest:
    """A request of the Open Inference Protocol, translated.

    Attributes:
        id: the client's id of the request, echoed in its responses.
        spec: the generation in the contract's terms.
        streams: whether there is a response per delta; otherwise there is one for all.
        prefix: beginning of the text output: the prompt, unless it is excluded.
        extras: names of the requested outputs besides the text.
        marks_end: whether an empty last response marks the end.
    """

    id: str
    spec: types_pb2.GenerationSpec
    streams: bool
    prefix: str
    extras: frozenset[str]
    marks_end: bool


def read(request: oip.ModelInferRequest) -> InferRequest:
    """Translates a request. Raises `ServiceError`."""
    if len(request.id.encode()) > MAX_ID_BYTES:
        raise invalid("id", f"has more than {MAX_ID_BYTES} bytes")
    check_version(request.model_name, request.model_version)
    given = read_inputs(request, INPUTS)
    text = given.get(TEXT.name)
    if not isinstance(text, str):
        raise invalid(TEXT.name, "is missing")
    streams = bool(given.get(STREAM.name, False))
    excludes = bool(given.get(EXCLUDE.name, streams))
    if streams and not excludes:
        raise invalid(EXCLUDE.name, "cannot be false for a stream: its responses hold new text only")
    return InferRequest(
        id=request.id,
        spec=_spec(request.model_name, text, str(given.get(SAMPLING.name, "{}"))),
        streams=streams,
        prefix="" if excludes else text,
        extras=_extras(request, given),
        marks_end=_marks_end(request),
    )


def check_version(model: str, version: str) -> None:
    """Raises `ServiceError` MODEL_NOT_FOUND for an unknown version."""
    if version not in ("", VERSION):
        raise not_found("model", f"{model}/{version}", f"its one version here is {VERSION!r}")


def _extras(request: oip.ModelInferRequest, given: Mapping[str, str | bool]) -> frozenset[str]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise invalid("outputs", f"{output.name[:64]!r} is not an output of this model: {', '.join(OUTPUTS)}")
    wanted = {output.name for output in request.outputs}
    return frozenset(one.name for switch, one in EXTRAS.items() if given.get(switch) or one.name in wanted)


def _marks_end(request: oip.ModelInferRequest) -> bool:
    for name in request.parameters:
        if name != WANTS_FINAL:
            raise unsupported(name[:64], f"the parameter {name[:64]!r} is not supported here: leave it out")
    return WANTS_FINAL in request.parameters and request.parameters[WANTS_FINAL].bool_param


class Plain(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The sampling_parameters that are handled here, by vLLM's names; `CHOICE` adds the others."""

    max_tokens: int = MAX_TOKENS
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1


# Numbers may be written as strings, as Triton's examples do.
_REST = [(row.name, row.type | None, None) for row in CHOICE if row.name not in Plain.__struct_fields__]
SamplingOptions = cast("type[Plain]", msgspec.defstruct("SamplingOptions", _REST, bases=(Plain,), frozen=True))


def _spec(model: str, text: str, parameters: str) -> types_pb2.GenerationSpec:
    asked = _sampling(parameters)
    if asked.n != 1:
        raise unsupported("n", "n: a request of this protocol has one output here; send several requests")
    try:
        return types_pb2.GenerationSpec(
            model=model,
            text=text,
            sampling=types_pb2.SamplingParams(**_choice(asked)),
            stop=types_pb2.StopConditions(
                strings=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
                token_ids=asked.stop_token_ids,
                include=asked.include_stop_str_in_output,
                ignore_eos=asked.ignore_eos,
            ),
            output=types_pb2.OutputOptions(token_records=False, skip_special_tokens=asked.skip_special_tokens),
        )
    except ValueError as error:
        raise invalid(SAMPLING.name, f"a number has a value that its field cannot hold: {error}") from None


def _choice(asked: Plain) -> dict[str, Any]:
    """Returns the parameters that choose tokens, as fields of the contract's SamplingParams."""
    given = msgspec.structs.asdict(asked)
    found = {row.name: given[row.name] for row in CHOICE if given[row.name] is not None}
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)  # vLLM's -1 also means no limit
    if "seed" in found:
        found["seed"] &= (1 << 64) - 1  # vLLM's seed is signed
    return found


def _sampling(text: str) -> Plain:
    try:
        found: Any = msgspec.json.decode(text)
        return msgspec.convert(found, SamplingOptions, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(SAMPLING.name, str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        raise invalid(SAMPLING.name, "is not a JSON object") from None
