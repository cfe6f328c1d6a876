"""Converts sampling parameters between the contract's messages and the engine's values, by the engine's table. Pure.

Ranges are checked elsewhere; the number of entries is checked here, before they are copied.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from google.protobuf.message import Message
from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_num
from sluice_server.engine.parameter_kinds import Biases, Ids, Number, Parameter
from sluice_server.engine.parameters import FROM_MODEL, PARAMETERS
from sluice_server.engine.request import Limits, SamplingParams


class ParameterField(NamedTuple):
    """A parameter in a message; `off` is the value for which the field is left out, None if there is none."""

    row: Parameter
    off: float | None

    def effective(self, params: SamplingParams) -> object:
        """Returns the parameter's value in the field's type."""
        return dict(self.row.of(params)) if isinstance(self.row, Biases) else self.row.of(params)


def _within(group: str) -> Mapping[str, ParameterField]:
    """Returns the parameters in one message, by field; `group` is the message's path in a GenerationSpec."""
    found = {}
    for row in PARAMETERS:
        parent, _, field = row.field.rpartition(".")
        if parent == group:
            found[field] = ParameterField(row, row.off if isinstance(row, Number) else None)
    return found


SAMPLING, BEAM, STOP, OUTPUT = (_within(group) for group in ("sampling", "sampling.beam", "stop", "output"))
_SETTLED = "max_tokens"  # settled by the engine


def taken(spec: types_pb2.GenerationSpec, limits: Limits) -> dict[str, Any]:
    """Returns the parameters that a request sets, by name. Raises `ServiceError` for too many entries."""
    found: dict[str, Any] = {}
    parts: tuple[tuple[Mapping[str, ParameterField], Message], ...] = (
        (SAMPLING, spec.sampling),
        (BEAM, spec.sampling.beam),
        (STOP, spec.stop),
        (OUTPUT, spec.output),
    )
    for places, part in parts:
        for field, value in part.ListFields():
            if field.name in places:
                row = places[field.name].row
                if isinstance(row, Ids | Biases):
                    check_num(row.name, len(value), row.most(limits))
                found[row.name] = row.taken(value)
    return found


def told_sampling(params: SamplingParams, bad_words: Iterable[str]) -> types_pb2.SamplingParams:
    """Returns all sampling parameters in effect, except `max_tokens`."""
    beam = types_pb2.BeamSearch(**_effective(BEAM, params)) if params.beam_width else None
    made = types_pb2.SamplingParams(**_effective(SAMPLING, params), bad_words=bad_words, beam=beam)
    for call in params.logits_processors:
        made.logits_processors.add(name=call.name, arguments=dict(call.arguments))
    if params.strategy is not None:
        made.strategy.MergeFrom(
            types_pb2.SamplingStrategy(name=params.strategy.name, arguments=dict(params.strategy.arguments))
        )
    return made


def told_stop(params: SamplingParams, strings: Iterable[str], *, include: bool) -> types_pb2.StopConditions:
    """Returns all stop conditions in effect."""
    return types_pb2.StopConditions(**_effective(STOP, params), strings=strings, include=include)


def told_output(params: SamplingParams) -> dict[str, Any]:
    """Returns the output options in effect that are sampling parameters, as fields of OutputOptions."""
    return _effective(OUTPUT, params)


def model_defaults(params: SamplingParams) -> types_pb2.SamplingParams:
    """Returns the model's defaults of the parameters for which a model may set one."""
    fields: dict[str, Any] = {row.name: row.of(params) for row in FROM_MODEL}
    return types_pb2.SamplingParams(**fields)


def _effective(places: Mapping[str, ParameterField], params: SamplingParams) -> dict[str, Any]:
    found = {}
    for field, place in places.items():
        value = place.effective(params)
        if value != place.off and field != _SETTLED:
            found[field] = value
    return found
