"""Reads what a user types on a terminal, with history and editing; several lines where they are pasted or stand between
two lines of three quotes."""

import select
import sys

QUOTES = '"""'
PROMPT, CONTINUED = "> ", "… "
PASTE_S = 0.03  # a paste's next line is there by then; nobody types as fast


class LineReader:
    """Reads messages from standard input, a terminal. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""

    def __init__(self) -> None:
        self._has_brackets = _bracket_pastes()

    def read(self) -> str:
        """Returns the next message."""
        line = input(PROMPT)
        if line.strip() == QUOTES:
            return self._quoted()
        lines = [line]
        while not self._has_brackets and _has_more():
            lines.append(input())
        return "\n".join(lines)

    def _quoted(self) -> str:
        lines: list[str] = []
        while (line := input(CONTINUED)).strip() != QUOTES:
            lines.append(line)
        return "\n".join(lines)


def _bracket_pastes() -> bool:
    """Have the terminal mark what is pasted, so that its lines are one message. Returns False where that is unknown."""
    try:
        import readline  # input() uses it once it is imported
    except ImportError:  # some Pythons are built without it: then there is no history either
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off for its own prompt
    return True


def _has_more() -> bool:
    """Returns True if another line has arrived with the last one, as when several lines are pasted."""
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])
