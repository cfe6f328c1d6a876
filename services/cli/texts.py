"""The texts that a command is given, as arguments, in a file or on standard input, and the options that they have in
common."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

STDIN = "-"
MAX_TEXTS = 256  # of one call; the contract allows more, but this way vectors come while others are computed
MAX_BYTES = 1 << 20  # of one call, as the contract has it

FileOption: TypeAlias = Annotated[
    Path | None, typer.Option("--file", envvar="SLUICE_TEXTS_FILE", help="file of texts, one a line")
]
InstructionOption: TypeAlias = Annotated[
    str | None, typer.Option(envvar="SLUICE_INSTRUCTION", help="an instruction, for models that take one")
]
TruncateOption: TypeAlias = Annotated[
    Literal["none", "left", "right"],
    typer.Option(envvar="SLUICE_TRUNCATE", help="the side that texts beyond the context lose; none refuses them"),
]


def texts_of(arguments: Sequence[str] | None, file: Path | None, name: str) -> list[str]:
    """Returns the texts of a command whose argument is called `name`. Raises BadParameter if there are none, or one
    cannot be read."""
    if bool(arguments) == (file is not None):
        raise typer.BadParameter(f"give either {name}, where {STDIN} reads standard input, or --file")
    if file is not None:
        try:
            return _lines(file.read_bytes(), str(file))
        except OSError as error:
            raise typer.BadParameter(f"--file: cannot read {file}: {error.strerror}") from error
    given = list(arguments or ())
    if given == [STDIN]:
        return _lines(sys.stdin.buffer.read(), "standard input")
    return [decoded(os.fsencode(one), name) for one in given]


def decoded(raw: bytes, name: str) -> str:
    """Returns the text of bytes. Raises BadParameter if they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at position {error.start}"
        raise typer.BadParameter(f"{name}: is not UTF-8 ({found}); convert it, for example with iconv") from error


def _lines(raw: bytes, source: str) -> list[str]:
    found = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        if not line.strip():
            raise typer.BadParameter(f"{source}: line {number} is empty; give one text a line")
        found.append(decoded(line.removesuffix(b"\r"), f"{source}: line {number}"))
    return found


def parts(texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields the texts in parts that a call may have, each with the number of texts before it. A text that is too large
    for any call is a part of its own, which the server refuses."""
    first, size = 0, 0
    for at, text in enumerate(texts):
        num_bytes = len(text.encode())
        if at > first and (at - first == MAX_TEXTS or size + num_bytes > MAX_BYTES):
            yield first, list(texts[first:at])
            first, size = at, 0
        size += num_bytes
    yield first, list(texts[first:])
