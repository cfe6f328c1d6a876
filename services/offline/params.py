"""Defines the sampling parameters as one flat value, and writes them to a GenerationSpec of the contract.

Ranges are checked by the gateway's validation.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.message import Message
from sluice.v1 import types_pb2

from sluice_server.engine.errors import invalid


def _field(path: str) -> Any:  # noqa: ANN401 # typed as the value, as dataclasses.field itself is
    """Defines an optional parameter; `path` is its field in the contract."""
    return dataclasses.field(default=None, metadata={"path": path})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of a generation. None means the model's default, as in the service.

    `protos/sluice/v1/types.proto` says what each one means and which values it may have.

    Attributes:
        max_tokens: None generates until the context is full.
        stop: texts that end an output; a single one may be given as a string.
        logits_processors: names of plugins, in their order, with the arguments of each.
        strategy: the name of one plugin, with its arguments.
        json_schema: JSON, or a mapping.
        bypass_cache: neither use nor fill the prefix cache.
        speculate: False disables drafts for this prompt.
    """

    max_tokens: int | None = _field("sampling.max_tokens")
    min_tokens: int | None = _field("sampling.min_tokens")
    temperature: float | None = _field("sampling.temperature")
    top_k: int | None = _field("sampling.top_k")
    top_p: float | None = _field("sampling.top_p")
    min_p: float | None = _field("sampling.min_p")
    typical_p: float | None = _field("sampling.typical_p")
    presence_penalty: float | None = _field("sampling.presence_penalty")
    frequency_penalty: float | None = _field("sampling.frequency_penalty")
    repetition_penalty: float | None = _field("sampling.repetition_penalty")
    logit_bias: Mapping[int, float] | None = _field("sampling.logit_bias")
    allowed_token_ids: Sequence[int] | None = _field("sampling.allowed_token_ids")
    bad_token_ids: Sequence[int] | None = _field("sampling.bad_token_ids")
    bad_words: str | Sequence[str] | None = _field("sampling.bad_words")
    logits_processors: Mapping[str, Mapping[str, str]] | None = _field("sampling.logits_processors")
    strategy: Mapping[str, Mapping[str, str]] | None = _field("sampling.strategy")
    seed: int | None = _field("sampling.seed")
    n: int | None = _field("sampling.n")
    best_of: int | None = _field("sampling.best_of")
    beam_width: int | None = _field("sampling.beam.width")
    length_penalty: float | None = _field("sampling.beam.length_penalty")
    early_stopping: bool | None = _field("sampling.beam.early_stopping")
    stop: str | Sequence[str] | None = _field("stop.strings")
    stop_token_ids: Sequence[int] | None = _field("stop.token_ids")
    include_stop: bool | None = _field("stop.include")
    ignore_eos: bool | None = _field("stop.ignore_eos")
    logprobs: int | None = _field("output.logprobs")
    logprob_token_ids: Sequence[int] | None = _field("output.logprob_token_ids")
    prompt_logprobs: int | None = _field("output.prompt_logprobs")
    skip_special_tokens: bool | None = _field("output.skip_special_tokens")
    split_sections: bool | None = _field("output.split_sections")
    json_schema: str | Mapping[str, object] | None = _field("constraint.json_schema")
    json_object: bool | None = _field("constraint.json_object")
    regex: str | None = _field("constraint.regex")
    grammar: str | None = _field("constraint.grammar")
    choices: Sequence[str] | None = _field("constraint.choice.texts")
    truncate_prompt_tokens: int | None = _field("truncate_prompt_tokens")
    bypass_cache: bool | None = _field("cache.bypass")
    priority: int | None = _field("scheduling.priority")
    speculate: bool | None = _field("speculation.enabled")
    max_draft_tokens: int | None = _field("speculation.max_tokens")


Given = SamplingParams | Mapping[str, Any] | None
PATHS: dict[str, str] = {field.name: field.metadata["path"] for field in dataclasses.fields(SamplingParams)}


def params_of(given: Given) -> SamplingParams:
    """Converts a caller's value. Raises TypeError for another type, or an unknown parameter."""
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{type(given).__name__} is no SamplingParams, and no mapping of its fields")
    for name in given:
        if name not in PATHS:
            near = difflib.get_close_matches(str(name), PATHS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PATHS)}"
            raise TypeError(f"{name!r} is no parameter of a generation; {hint}")
    return SamplingParams(**given)


def fill(spec: types_pb2.GenerationSpec, params: SamplingParams) -> None:
    """Sets each parameter that is not None in `spec`.

    Raises ServiceError naming a parameter whose value its field cannot hold.
    """
    for name, path in PATHS.items():
        value = getattr(params, name)
        if value is None:
            continue
        try:
            if name == "json_schema" and not isinstance(value, str):
                value = msgspec.json.encode(value).decode()
            if name == "logits_processors":
                value = [types_pb2.LogitsProcessor(name=one, arguments=more) for one, more in value.items()]
            if name == "strategy":
                ((one, more),) = value.items()
                spec.sampling.strategy.CopyFrom(types_pb2.SamplingStrategy(name=one, arguments=more))
                continue
            _set(spec, path, value)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise invalid(name, f"{_short(value)} is no value of it: {error}") from None


def _set(spec: types_pb2.GenerationSpec, path: str, value: Any) -> None:  # noqa: ANN401 # the value of any parameter
    *above, name = path.split(".")
    message: Message = spec
    for step in above:
        _check_alone(message, step)
        message = getattr(message, step)
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and not field.is_repeated:
        if value:  # JsonObject, an empty message: only its presence counts
            _check_alone(message, name)
            getattr(message, name).SetInParent()
        return
    _check_alone(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, name).update(value)
    elif field.is_repeated:
        getattr(message, name).extend([value] if isinstance(value, str) else value)
    else:
        setattr(message, name, value)


def _check_alone(message: Message, name: str) -> None:
    """Raises ServiceError if another field of the same oneof is set."""
    of = message.DESCRIPTOR.fields_by_name[name].containing_oneof
    first = None if of is None else message.WhichOneof(of.name)
    if first is not None and first != name:
        raise invalid(message.DESCRIPTOR.name.lower(), f"{first} and {name} exclude each other: give one of them")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
