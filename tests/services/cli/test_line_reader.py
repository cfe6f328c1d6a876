"""What is typed or pasted on a terminal, read through a real one."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

READ = (
    "from sluice_server.services.cli.line_reader import LineReader\n"
    "reader = LineReader()\n"
    "try:\n"
    "    while True:\n"
    "        print('READ', ascii(reader.read()), flush=True)\n"
    "except EOFError:\n"
    "    print('END')\n"
)
WITHOUT_READLINE = "import sys; sys.modules['readline'] = None\n"
Typed = Callable[[str], list[str]]


@pytest.fixture(params=["", WITHOUT_READLINE], ids=["readline", "without"])
def typed(request: pytest.FixtureRequest) -> Iterator[Typed]:
    """Types texts, each when a prompt is shown, and returns what was read."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    command = [sys.executable, "-c", request.param + READ]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)

    def run(text: str) -> list[str]:
        seen = read_until(b"> ", b"")
        os.write(ours, text.encode())
        seen += read_until(b"> ", read_until(b"READ", b""))  # at the next prompt: Ctrl-D means nothing before
        os.write(ours, b"\x04")
        seen += read_until(b"END", b"")
        lines = seen.decode().replace("\r\n", "\n").split("\n")
        return [line.partition("READ ")[2] for line in lines if "READ " in line]

    def read_until(mark: bytes, seen: bytes) -> bytes:
        at = max(0, seen.find(b"READ"))
        while mark not in seen[at:]:
            seen += os.read(ours, 4096)
        return seen

    try:
        yield run
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_a_line_is_a_message(typed: Typed) -> None:
    assert typed("grüße 你好\n") == [ascii("grüße 你好")]


def test_lines_between_quotes_are_one_message(typed: Typed) -> None:
    assert typed('"""\none\n\n/two\n"""\n') == [r"'one\n\n/two'"]


def test_pasted_lines_are_one_message(typed: Typed, request: pytest.FixtureRequest) -> None:
    has_brackets = "without" not in request.node.name
    pasted = "\x1b[200~one\n\n/two\x1b[201~\n" if has_brackets else "one\n\n/two\n"
    assert typed(pasted) == [r"'one\n\n/two'"]
