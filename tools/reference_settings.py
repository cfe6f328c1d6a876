"""Renders the options of every command as a Markdown page, from the command line's own definitions. Pure."""

from collections.abc import Iterator

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from sluice_server.services.cli.main import app


def page() -> str:
    """Returns the whole page."""
    lines = [
        "# Options",
        "",
        "<!-- Generated from the command line by `make reference`. Do not edit. -->",
        "",
        "Each option is also an environment variable. The command line wins over the environment, and that over the",
        "file of `sluice serve --config`. A switch is 1 or 0 in the environment. `sluice COMMAND --help` has the same",
        "texts. [Operations](../operations.md) says which of them matter.",
        "",
    ]
    for name, command in _commands("sluice", get_command(app)):
        lines += _command(name, command)
    return "\n".join(lines).rstrip() + "\n"


def _commands(name: str, command: object) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperCommand):
        yield name, command
    elif isinstance(command, TyperGroup):
        for below, one in command.commands.items():
            yield from _commands(f"{name} {below}", one)


def _command(name: str, command: TyperCommand) -> Iterator[str]:
    yield from (f"## {name}", "", " ".join((command.help or "").split()), "")
    arguments = [one for one in command.params if isinstance(one, TyperArgument)]
    if arguments:
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| `{one.metavar or one.name}` | {_text(one.help)} |" for one in arguments)
        yield ""
    by_panel: dict[str, list[TyperOption]] = {}
    for one in command.params:
        if isinstance(one, TyperOption) and one.name != "help":
            by_panel.setdefault(one.rich_help_panel or "", []).append(one)
    for panel, options in by_panel.items():
        if panel:
            yield from (f"### {name}: {panel}", "")
        yield from ("| option | variable | default | meaning |", "| --- | --- | --- | --- |")
        yield from (_row(one) for one in options)
        yield ""


def _row(option: TyperOption) -> str:
    names = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
    variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    variable = ", ".join(f"`{one}`" for one in variables)
    return f"| {names} | {variable} | {_default(option)} | {_text(option.help)} |"


def _default(option: TyperOption) -> str:
    if option.required:
        return "required"
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == "" or not isinstance(value, str | int | float) else f"`{value}`"


def _text(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|").replace("<", "\\<")
