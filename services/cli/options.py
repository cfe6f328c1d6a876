"""Command-line options made from the two configuration dataclasses, so that each setting is defined once.

Each field becomes `--field-name` and `SLUICE_FIELD_NAME`; its help text is the field's.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ENV_PREFIX, ServiceConfig

GROUPS = {ServiceConfig: "Service", EngineConfig: "Engine"}


def takes_settings(command: Callable[[EngineConfig, ServiceConfig], None]) -> Callable[..., None]:
    """Wrap a command that takes both configurations into one with an option for every field."""

    def run(**values: Any) -> None:  # noqa: ANN401 # types are in the signature below
        configs = [cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)}) for cls in GROUPS]
        service, engine = configs
        assert isinstance(service, ServiceConfig)
        assert isinstance(engine, EngineConfig)
        command(engine, service)

    parameters = [_parameter(field, panel) for cls, panel in GROUPS.items() for field in dataclasses.fields(cls)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _parameter(field: "dataclasses.Field[Any]", panel: str) -> inspect.Parameter:
    names = [f"--{field.name.replace('_', '-')}"]
    if field.type is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    info = typer.Option(
        *names, help=field.metadata["help"], envvar=ENV_PREFIX + field.name.upper(), rich_help_panel=panel
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[field.type, info])
