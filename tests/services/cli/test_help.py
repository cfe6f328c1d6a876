"""The help of every command: no name is cut, and the options of `serve` are grouped, the usual ones first."""

import dataclasses
import textwrap

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.main import app
from sluice_server.services.cli.options import GROUPS, USUAL
from sluice_server.services.config import ServiceConfig

COMMANDS = [
    "serve",
    "generate",
    "chat",
    "embed",
    "classify",
    "rerank",
    "bench",
    "run-batch",
    "top",
    "edge",
    "demo",
    "healthcheck",
    "import-gguf",
    "calibrate",
    "keys",
    "kvstore",
]


def shown(*arguments: str) -> str:
    """The output of a help at 80 columns."""
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_name_is_there_in_one_piece(name: str) -> None:
    text = shown(name)
    assert "…" not in textwrap.dedent(text).replace("tokenizer-0 …", "") and max(map(len, text.splitlines())) <= 80
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    words = text.replace(",", " ").replace(";", " ").replace("]", " ").split()
    for one in command.commands[name].params:
        if one.param_type_name == "option":
            variables = [one.envvar] if isinstance(one.envvar, str) else one.envvar or []
            missing = [flag for flag in (*one.opts, *one.secondary_opts, *variables) if flag not in words]
            assert not missing


def test_serve_shows_the_usual_options_first() -> None:
    text = shown("serve")
    headings = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[:2] == ["Arguments", USUAL]
    assert [one for one in headings if one in GROUPS] == [one for one in GROUPS if one in headings]
    usual = text.split(f"{USUAL}:")[1].split("\n\n")[0]
    assert sum(line.startswith("  --") for line in usual.splitlines()) == len(GROUPS[USUAL]) + 1  # and --config


def test_the_groups_have_settings_that_exist_once() -> None:
    names = [name for group in GROUPS.values() for name in group]
    fields = {field.name for cls in (ServiceConfig, EngineConfig) for field in dataclasses.fields(cls)}
    assert len(names) == len(set(names)) and set(names) <= fields


def test_the_list_of_commands_has_whole_sentences() -> None:
    text = shown()
    assert "..." not in text.split("Commands:")[1] and all(f"\n  {name} " in text for name in COMMANDS)
    assert "Stream a completion of PROMPT.\n" in text


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_printed_alone(flag: str) -> None:
    result = CliRunner().invoke(app, [flag])
    assert (result.exit_code, result.output.count("\n")) == (0, 1) and result.output[0].isdigit()
