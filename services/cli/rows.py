"""Rows of an answer: as JSON, one object a line, or as a table for who looks at a terminal."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console

PREVIEW = 200  # characters of a text in a table
GAP = 2  # between two columns
Row: TypeAlias = tuple[Mapping[str, object], tuple[str, ...]]  # its object, and its cells in the table

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", envvar="SLUICE_JSON", help="print JSON lines on a terminal, too")
]


def show(rows: Iterable[Row], columns: Sequence[str], as_json: bool) -> None:
    """Write rows to standard output as they come, each as its object; on a terminal write a table of all."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and not as_json:
        draw(console, (cells for _, cells in rows), columns)
        return
    for row, _ in rows:
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def draw(console: "Console", rows: Iterable[tuple[str, ...]], columns: Sequence[str]) -> None:
    """Write a table. The last column is text, which ends with an ellipsis where it has no room; the others are whole
    and stand at the right."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    found = [tuple(map(printable, cells)) for cells in rows]
    room = console.width
    for at, heading in enumerate(columns[:-1]):
        width = max(cell_len(cells[at]) for cells in [tuple(columns), *found])
        table.add_column(heading, justify="right", no_wrap=True)
        room -= width + GAP
    table.add_column(columns[-1], no_wrap=True, overflow="ellipsis", max_width=max(room, len(columns[-1])))
    for cells in found:
        table.add_row(*map(Text, cells))
    console.print(table)


def printable(text: str) -> str:
    """Returns the beginning of a text without what would move the cursor or break the line."""
    return "".join(one if one.isprintable() else " " for one in text[:PREVIEW])
