"""Texts of commands, their parts, and the tables that a terminal gets."""

from pathlib import Path

import pytest
import typer
from rich.console import Console

from sluice_server.services.cli import classify, embed, rerank
from sluice_server.services.cli.rows import draw
from sluice_server.services.cli.texts import MAX_BYTES, MAX_TEXTS, parts, texts_of


def test_a_file_has_one_text_a_line(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_bytes("über\r\n two \n-\n".encode())
    assert texts_of(None, file, "TEXT") == ["über", " two ", "-"]
    assert texts_of(["-", "x"], None, "TEXT") == ["-", "x"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"", "line 1 is empty"), (b"a\n\nb", "line 2 is empty"), (b"a\n\xff", "line 2: is not UTF-8 (byte 0xff")],
)
def test_a_line_that_is_no_text_is_named(raw: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_bytes(raw)
    with pytest.raises(typer.BadParameter) as refused:
        texts_of([], tmp_path / "texts", "TEXT")
    assert said in refused.value.message


def test_parts_are_what_a_call_may_have() -> None:
    assert [(first, len(part)) for first, part in parts(["x"] * (2 * MAX_TEXTS + 1))] == [
        (0, MAX_TEXTS),
        (MAX_TEXTS, MAX_TEXTS),
        (2 * MAX_TEXTS, 1),
    ]
    half = "ü" * (MAX_BYTES // 4)
    assert [(first, len(part)) for first, part in parts([half, half, "x", half + "x", half])] == [
        (0, 2),
        (2, 2),
        (4, 1),
    ]
    assert [first for first, _ in parts(["x", half * 3, "x"])] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "columns", "want"),
    [
        ([embed.row(7, "a\x1b[2Jb\n" + "c" * 99, 3, [0.6, -0.8])], embed.COLUMNS, ["7", "3", "2", "1.000", "+0.600"]),
        ([classify.row(0, "text", ["no", "yes"], [0.25, 0.75])], classify.COLUMNS, ["0", "0.7500", "yes", "text"]),
        ([rerank.row(4, "text", 0.5)], rerank.COLUMNS, ["4", "0.5000", "text"]),
    ],
)
def test_a_table_has_a_line_for_each_row(
    rows: list[tuple[dict[str, object], tuple[str, ...]]], columns: tuple[str, ...], want: list[str]
) -> None:
    console = Console(width=60, force_terminal=False)
    with console.capture() as captured:
        draw(console, (cells for _, cells in rows), columns)
    heading, *lines = captured.get().splitlines()
    assert heading.split() == list(columns) and [line.split()[: len(want)] for line in lines] == [want]
    assert "\x1b" not in lines[0] and len(lines[0]) <= 60


def test_the_scores_of_all_classes_are_told_the_best_first() -> None:
    found, _ = classify.row(0, "text", ["no", "yes"], [0.25, 0.75])
    assert found["label"] == "yes"
    assert found["scores"] == [{"label": "yes", "score": 0.75}, {"label": "no", "score": 0.25}]
