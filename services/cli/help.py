"""A command as this command line has it. Its help is plain text: options under the headings of their groups, and every
name whole at any width. Typer's own tables cut names that do not fit their column.
"""

from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer._click import Context, HelpFormatter, Parameter  # the types that typer's own methods have

REST = "Options"  # the heading of options without a group


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, in the order of the command's parameters."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """Returns the parameters, of which few convert their values."""
        return _converting_less(super().get_params(ctx))

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the sections: arguments, then the groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                name = one.rich_help_panel or REST if isinstance(one, TyperOption) else "Arguments"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


class CommandList(TyperGroup):
    """A command of commands, whose help has the whole first sentence of each."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """Returns the parameters, of which few convert their values."""
        return _converting_less(super().get_params(ctx))

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the section."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(one.help or "")) for name, one in self.commands.items()])


def _converting_less(parameters: "list[Parameter]") -> "list[Parameter]":
    """Leaves out the conversion of what is no text to convert: defaults, and text where text is wanted. For every
    conversion typer makes a converter with pydantic: a fifth of what `serve` does before it starts a process."""
    for one in parameters:
        if isinstance(one, TyperOption | TyperArgument) and "process_value" not in vars(one):
            one.process_value = _lean(one)  # type: ignore[assignment] # typer makes the parameters itself
    return parameters


def _lean(parameter: TyperOption | TyperArgument) -> "Callable[[Context, Any], Any]":
    convert, default, callback = parameter.process_value, parameter.default, parameter.callback

    def process_value(ctx: "Context", value: object) -> object:
        is_done = value is None or value is default or (isinstance(value, str) and isinstance(default, str))
        if not is_done or parameter.required:
            return convert(ctx, value)
        return value if callback is None else callback(ctx, parameter, value)

    return process_value


def _first_sentence(text: str) -> str:
    first, end, _ = " ".join(text.split()).partition(". ")
    return first + end.rstrip()
