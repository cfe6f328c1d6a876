"""Reads a call whose name stands before its arguments, with marks around it: name[ARGS]{…}. Pure.

The arguments are a JSON object, and are streamed. What ends the call is up to the format's closings.
"""

import re
from collections.abc import Callable

import msgspec

from sluice_server.services.sections.json_call import ArgumentStream, compact
from sluice_server.services.sections.objects import ObjectScanner
from sluice_server.services.sections.split import may_become
from sluice_server.services.sections.tool_format import CallReader, CharWise, FoundCall, FoundPart, Opened, ParserState

MAX_HEAD = 256  # characters before the arguments
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORD = re.compile(r"[A-Za-z0-9_.:-]*\s*")


class HeadedReader:
    """A reader of a head and arguments, fed with single characters."""

    def __init__(self, opened: Opened, marks: tuple[str, ...], name_of: Callable[[str], str]) -> None:
        """`marks`: may stand in the head, in this order. `name_of`: takes the name from the head; "" if it has none."""
        self._names = opened.tools.names
        self._seen = {mark: opened.marks.get(mark, mark) for mark in marks}
        self._name_of = name_of
        self._head = ""
        self._name = ""
        self._scanner: ObjectScanner | None = None
        self._stream: ArgumentStream | None = None

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return self._head + (self._scanner.raw if self._scanner is not None else "")

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        if self._scanner is None:
            if text != "{":
                before, self._head = self._head, self._head + text
                if self._may_be_head():
                    return ParserState.OPEN, ""
                self._head = before
                return ParserState.BROKEN, text
            if not self._begin():
                return ParserState.BROKEN, text
        assert self._scanner is not None
        state, rest = self._scanner.feed(text)
        if self._stream is not None:
            self._stream.add(text[: len(text) - len(rest)])
        return state, rest

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        return None if self._stream is None else self._stream.part()

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the call; none if its arguments are not valid."""
        assert self._scanner is not None
        try:
            arguments = compact(msgspec.json.decode(self._scanner.raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return ()
        return () if arguments is None else (FoundCall(self._name, arguments),)

    def _may_be_head(self) -> bool:
        """Returns True if the text may go on to the arguments."""
        rest = self._head.lstrip()
        for mark in self._seen.values():
            rest = rest[len(_WORD.match(rest)[0]) :]  # type: ignore[index] # it matches everywhere
            if rest.startswith(mark):
                rest = rest[len(mark) :].lstrip()
        return len(self._head) <= MAX_HEAD and (not rest or may_become(rest, tuple(self._seen.values())))

    def _begin(self) -> bool:
        """Starts to read the arguments; returns False if no name is before them."""
        head = self._head
        for mark, seen in self._seen.items():
            head = head.replace(seen, mark)
        name = self._name_of(head).strip()
        if not (self._may_be_head() and _NAME.fullmatch(name)):
            return False
        self._name = name
        self._scanner = ObjectScanner()
        if name in self._names:
            self._stream = ArgumentStream(name)
        return True


def headed_reader(marks: tuple[str, ...], name_of: Callable[[str], str]) -> Callable[[Opened], CallReader]:
    """Returns what makes readers of a form: see `HeadedReader`."""
    return lambda opened: CharWise(HeadedReader(opened, marks, name_of))
