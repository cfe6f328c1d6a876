"""Shows an answer while it is made: as Markdown on a terminal, unchanged elsewhere."""

import re
import sys
import time
from typing import TYPE_CHECKING, Protocol

from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FRAME_S = 1 / 12
FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")  # they could move the cursor or worse


class AnswerDisplay(Protocol):
    """Takes an answer piece by piece."""

    def add(self, text: str) -> None:
        """Show more text."""

    def end(self) -> None:
        """Show what is left. Called once, also for an answer that was cut short."""


class PlainDisplay:
    """Writes the text to standard output as it comes."""

    def __init__(self) -> None:
        self._last = ""

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text or self._last

    def end(self) -> None:
        if self._last and not self._last.endswith("\n"):
            self.add("\n")


class MarkdownDisplay:
    """Prints each paragraph, list or code block once it is complete; until then its last lines are drawn again and
    again. Only the unfinished block is redrawn, so that long answers scroll like other output."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._text = ""
        self._drawn_s = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def add(self, text: str) -> None:
        self._text += text.translate(CONTROLS)
        done = num_complete(self._text)
        now = time.monotonic()
        if not done and now - self._drawn_s < FRAME_S:
            return
        self._drawn_s = now
        if done:
            self._live.update("", refresh=True)  # else printing would draw the finished block below itself once more
            self._console.print(Markdown(self._text[:done]), "")
            self._text = self._text[done:]
        self._live.update(_LastLines(self._text), refresh=True)

    def end(self) -> None:
        self._live.update("")
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))


class _LastLines:
    """The end of a Markdown text, as much as a screen shows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def num_complete(text: str) -> int:
    """Returns how many characters of a Markdown text belong to blocks that are complete: followed by an empty line, and
    not inside a fence."""
    done, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        found = FENCE.match(line)
        if fence:
            fence = "" if found and found[1].startswith(fence) else fence
        elif found:
            fence = found[1]
        elif not line.strip() and line.endswith("\n") and at > len(line):
            done = at
    return done
