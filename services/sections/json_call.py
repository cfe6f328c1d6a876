"""Reads a call that is one JSON object with the tool's name and its arguments. Pure.

A call counts only when it is complete and valid. If it breaks earlier, all of it is text. Its arguments are streamed
where the name comes first, as models write it.
"""

import re

import msgspec

from sluice_server.services.sections.objects import ObjectScanner
from sluice_server.services.sections.tool_format import FoundCall, FoundPart, Opened, ParserState

ARGUMENTS = ("arguments", "parameters")  # keys that may hold the arguments
MAX_HEAD = 1024  # characters before the arguments, for a call to be streamed
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def compact(arguments: object) -> str | None:
    """Returns arguments as compact JSON; None unless they are an object. Some models write them as a JSON string."""
    try:
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
        return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else None
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def call_of(value: object) -> FoundCall | None:
    """Returns the call that a JSON value describes; None if it describes none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = compact(next((value[key] for key in ARGUMENTS if key in value), None))
    return None if arguments is None else FoundCall(name, arguments)


class ArgumentStream:
    """The pieces of one JSON object, as they come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsent: list[str] = []
        self._scanner = ObjectScanner()
        self._ended = False

    def add(self, text: str) -> None:
        """Takes text that begins with the object, or continues it; ignores what follows it."""
        if self._ended:
            return
        state, rest = self._scanner.feed(text)
        self._ended = state is not ParserState.OPEN
        if len(rest) < len(text):
            self._unsent.append(text[: len(text) - len(rest)])

    def part(self) -> FoundPart | None:
        """Returns the piece that came since the last one; None without one."""
        if not self._unsent:
            return None
        made = FoundPart(self._name, "".join(self._unsent))
        self._name = ""
        self._unsent.clear()
        return made


class JsonReader:
    """A reader of one JSON object with name and arguments."""

    def __init__(self, opened: Opened, beginnings: tuple[str, ...] = (), lead: str = "") -> None:
        """`beginnings`: how a call without an opening must begin. `lead`: a character that may precede the object."""
        self._scanner = ObjectScanner(() if opened.opening else beginnings)
        self._names = opened.tools.names
        self._lead = lead
        self._before = ""  # white space and the lead
        self._head: str | None = ""  # the text until the arguments begin; None: it is over
        self._stream: ArgumentStream | None = None

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return self._before + self._scanner.raw

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        if not self._scanner.size:
            text = self._skip(text)
        state, rest = self._scanner.feed(text)
        self._follow(text[: len(text) - len(rest)])
        return state, rest

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        return None if self._stream is None else self._stream.part()

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the call; none if the object is not a valid call."""
        try:
            found = call_of(msgspec.json.decode(self._scanner.raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return ()
        return () if found is None else (found,)

    def _skip(self, text: str) -> str:
        """Skips white space and the lead."""
        rest = text.lstrip()
        if self._lead and rest.startswith(self._lead):
            self._lead, rest = "", rest[1:].lstrip()
        self._before += text[: len(text) - len(rest)]
        return rest

    def _follow(self, text: str) -> None:
        """Starts to stream the arguments when they begin."""
        if self._stream is not None:
            self._stream.add(text)
        elif self._head is not None:
            self._head += text
            if (match := _HEAD.match(self._head)) and match[1] in self._names:
                self._stream = ArgumentStream(match[1])
                self._stream.add(self._head[match.end() :])
            if match or len(self._head) > MAX_HEAD:
                self._head = None


def json_reader(opened: Opened) -> JsonReader:
    """Returns a reader of one object behind an opening."""
    return JsonReader(opened)
