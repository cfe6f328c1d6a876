"""Settings that a supervisor passes to its processes by their environment: the inverse of `config.to_environment`.

The command line gives the same values for the same environment (`services.cli.options`), and takes longer to import
than they take to read.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ENV_PREFIX, ServiceConfig
from sluice_server.services.process.alone import run_alone

READ: dict[object, Callable[[str], object]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: bool(int(text)),
    tuple[str, ...]: lambda text: tuple(text.split()),
}
Settings = TypeVar("Settings")


def run_inherited(environment: Mapping[str, str]) -> int:
    """Run the process whose settings are in the environment. Returns its exit status. Raises ServiceError."""
    return run_alone(read(EngineConfig, environment), read(ServiceConfig, environment))


def read(settings: type[Settings], environment: Mapping[str, str]) -> Settings:
    """Returns the settings; one without a variable has its default."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type] # a dataclass, which no type says
        text = environment.get(ENV_PREFIX + field.name.upper())
        if text is not None:
            values[field.name] = READ[field.type](text)
    return settings(**values)
