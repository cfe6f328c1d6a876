"""What a chat knows of its model: its context, and the sampling parameters that hold where none are given. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice_server.engine.parameters import CHOICE
from sluice_server.engine.request import Limits
from sluice_server.services.cli.dialogue import Values

if TYPE_CHECKING:
    from sluice.v1 import control_pb2

MAX_TOKENS = 1024  # of an answer, unless the context is small
FALLBACK: Values = {"temperature": 0.7, "top_p": 0.9}  # for models that name no parameters; plain sampling rambles
SUGGESTED = tuple(row for row in CHOICE if row.from_model)


def limits_of(model: "control_pb2.Model") -> Limits:
    """Returns the limits that parameters are checked against before they are sent."""
    return Limits(model.context_length, model.vocab_size)


def suggested(model: "control_pb2.Model") -> dict[str, int | float]:
    """Returns the parameters of the model's generation_config.json that change anything."""
    values = {row.name: row.type(getattr(model.defaults, row.name)) for row in SUGGESTED}
    return {row.name: values[row.name] for row in SUGGESTED if abs(values[row.name] - row.neutral) > 1e-6}


def defaults_for(model: "control_pb2.Model") -> Values:
    """Returns the parameters to send unless others are given. The model's own are not sent: the server knows them."""
    own = suggested(model)
    return {"max_tokens": min(MAX_TOKENS, max(1, model.context_length // 2)), **({} if own else FALLBACK)}


def header(model: "control_pb2.Model", given: Values) -> str:
    """Returns the line that says which model answers, and how."""
    num = given.get("max_tokens", defaults_for(model)["max_tokens"])
    parts = [
        f"{model.id}: context {model.context_length:,} tokens, answers of at most {num:,}",
        _sampling(model, given),
    ]
    return "; ".join(parts)


def _sampling(model: "control_pb2.Model", given: Values) -> str:
    given = {name: value for name, value in given.items() if name != "max_tokens"}
    own = suggested(model)
    is_greedy = given.get("temperature") == 0.0  # then no other is of any use
    rest = {} if is_greedy else {name: value for name, value in (own or FALLBACK).items() if name not in given}
    source = "of its generation_config.json" if own else "as the model names none"
    shown = [_named(given)] if given else []
    shown += [f"{_named(rest)} ({source})"] if rest else []
    return ", ".join(shown)


def _named(values: Mapping[str, int | float]) -> str:
    return ", ".join(f"{name} {value:.6g}" if name != "seed" else f"seed {value}" for name, value in values.items())
