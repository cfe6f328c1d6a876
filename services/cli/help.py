"""The help of a command as plain text: options under the headings of their groups, and every name whole at any width.

Typer's own tables cut names that do not fit their column.
"""

from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter  # the types that typer's own method has

REST = "Options"  # the heading of options without a group


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, in the order of the command's parameters."""

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

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the section."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(one.help or "")) for name, one in self.commands.items()])


def _first_sentence(text: str) -> str:
    first, end, _ = " ".join(text.split()).partition(". ")
    return first + end.rstrip()
