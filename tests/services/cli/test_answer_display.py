"""How an answer is shown while it is made."""

import io

import pytest
from rich.console import Console

from sluice_server.services.cli.answer_display import MarkdownDisplay, num_complete

LONG = "".join(f"line {at} of many\n\n" for at in range(40))


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", ""),
        ("one", ""),
        ("one\n", ""),
        ("one\n\n", "one\n\n"),
        ("one\n\ntwo\n", "one\n\n"),
        ("\n\n", "\n\n"[:2]),
        ("```\na\n\nb\n", ""),
        ("~~~\n```\n\n", ""),
        ("```py\na\n\nb\n```\n\nthen", "```py\na\n\nb\n```\n\n"),
        ("````\n```\n\n````\n\n", "````\n```\n\n````\n\n"),
    ],
)
def test_a_block_is_complete_at_an_empty_line_outside_a_fence(text: str, complete: str) -> None:
    assert text[: num_complete(text)] == complete


def shown(*pieces: str) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10, color_system=None, legacy_windows=False)
    display = MarkdownDisplay(console)
    for piece in pieces:
        display.add(piece)
    display.end()
    return out.getvalue()


def test_a_finished_block_is_not_drawn_again() -> None:
    written = shown(*(piece + "\n" for piece in LONG.splitlines()))
    for at in range(40):
        assert 1 <= written.count(f"line {at} of many ") <= 2  # once while it was unfinished, once for good


def test_an_unfinished_block_is_drawn_no_higher_than_the_screen() -> None:
    code = "```\n" + "".join(f"row {at}\n" for at in range(30))
    drawn = shown(code).split("\x1b[2K")[0]
    assert "row 29" in drawn and "row 3\n" not in drawn.replace(" ", "").replace("row", "row ")


def test_an_answer_cannot_control_the_terminal() -> None:
    written = shown("a\x1b]0;title\x07b\x9b2J\n\n", "c\x1b[2J")
    assert "\x1b]0;" not in written and "\x9b" not in written and "\x1b[2J" not in written


def test_what_was_cut_short_is_shown() -> None:
    assert "half a sen" in shown("half a ", "sen")
