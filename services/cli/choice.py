"""Command-line options for sampling parameters, made from the table of sampling parameters."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sluice_server.engine.parameter_kinds import Number
from sluice_server.engine.parameters import CHOICE
from sluice_server.services.config import ENV_PREFIX

TAKEN = "choice"  # the parameter that the options replace


def takes_choice(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command that takes sampling parameters as `choice`, a mapping, into one with an option for each."""

    def run(**values: Any) -> None:  # noqa: ANN401 # types are in the signature below
        found = {row.name: values.pop(row.name) for row in CHOICE}
        command(**values, choice={name: value for name, value in found.items() if value is not None})

    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        parameters.extend(map(_parameter, CHOICE) if one.name == TAKEN else [one])
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _parameter(row: Number) -> inspect.Parameter:
    info = typer.Option(envvar=ENV_PREFIX + row.name.upper(), help=row.meaning)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(row.name, kind, default=None, annotation=Annotated[row.type | None, info])
