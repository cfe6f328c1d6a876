"""Settings from the environment that a supervisor makes: those that it has, and those that the command line reads."""

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig, to_environment
from sluice_server.services.process.inherited import read

OTHER: dict[object, Any] = {str: "a b=c", int: 12345, float: 0.1, tuple[str, ...]: ("one", "two")}


def other(settings: type[Any]) -> Any:  # noqa: ANN401 # of either class
    """Returns settings of which each differs from its default."""
    fields = dataclasses.fields(settings)
    values = {one.name: (not one.default) if one.type is bool else OTHER[one.type] for one in fields}
    return settings(**values)


@pytest.mark.parametrize("changed", [False, True])
def test_settings_arrive_as_they_were_and_as_the_command_line_reads_them(changed: bool) -> None:
    sent = (other(EngineConfig), other(ServiceConfig)) if changed else (EngineConfig(), ServiceConfig())
    environment = to_environment(*sent)
    assert (read(EngineConfig, environment), read(ServiceConfig, environment)) == sent
    seen: list[tuple[EngineConfig, ServiceConfig]] = []

    def keep(engine: EngineConfig, service: ServiceConfig) -> None:
        seen.append((engine, service))

    app = typer.Typer()
    app.command()(takes_settings(keep))
    assert CliRunner().invoke(app, [], env=environment).exit_code == 0
    assert seen == [sent]


def test_what_is_not_passed_has_its_default() -> None:
    assert read(ServiceConfig, {"SLUICE_MODEL": "here", "SLUICE_MODLE": "there"}) == ServiceConfig(model="here")
