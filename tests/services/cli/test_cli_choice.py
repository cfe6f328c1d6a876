from collections.abc import Mapping

import pytest
import sluice
import typer
from typer.testing import CliRunner

from sluice_server.engine.parameters import CHOICE
from sluice_server.services.cli.choice import takes_choice
from sluice_server.services.cli.dialogue import HELP, PARAMETERS
from sluice_server.services.cli.environment import names_of
from sluice_server.services.cli.main import app as sluice_app


def given(*options: str, **environment: str) -> list[tuple[Mapping[str, int | float], bool]]:
    """The arguments that a command is called with."""
    seen: list[tuple[Mapping[str, int | float], bool]] = []
    app = typer.Typer()

    def command(*, choice: Mapping[str, int | float], flag: bool = False) -> None:
        seen.append((choice, flag))

    app.command()(takes_choice(command))
    result = CliRunner().invoke(app, options, env=environment)
    assert result.exit_code == (0 if seen else 2), result.output
    return seen


def test_only_what_is_given_is_there() -> None:
    assert given() == [({}, False)]
    assert given("--top-k", "0", "--flag", "--min-p", "0.5") == [({"top_k": 0, "min_p": 0.5}, True)]
    assert given(SLUICE_TYPICAL_P="0.25") == [({"typical_p": 0.25}, False)]
    assert given("--top-k", "0.5") == []


@pytest.mark.parametrize("name", [row.name for row in CHOICE])
def test_every_one_is_an_option_a_parameter_and_a_variable(name: str) -> None:
    ((choice, _),) = given(f"--{name.replace('_', '-')}", "1")
    assert choice == {name: 1}
    assert name in sluice.GenerateOptions.__annotations__ and f"SLUICE_{name.upper()}" in names_of(sluice_app)
    assert name in PARAMETERS and name in HELP
