"""Reads a call with a tag for each argument: <function=f><parameter=a>…</parameter></function>. Pure.

Values are text. One that the tool's schema describes as no text is read as JSON, else as text. Texts are streamed.
"""

import json
import re

import msgspec

from sluice_server.services.sections.json_call import compact
from sluice_server.services.sections.tool_format import MAX_CALL, FoundCall, FoundPart, Opened, ParserState

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
MAX_NAME = 256  # characters of a name
_NAME = re.compile(r"[^<>\n]*\Z")
_WORDS = {"True": True, "False": False, "None": None}  # as models write them that know Python


class XmlReader:
    """A reader of one function with its parameters."""

    def __init__(self, opened: Opened) -> None:
        self._tools = opened.tools
        self._raw: list[str] = []
        self._size = 0
        self._buffer = ""  # consumed, and not understood yet
        self._step = self._name if opened.opening == FUNCTION else self._opening
        self._function = ""
        self._key = ""
        self._value: list[str] = []  # of the parameter being read, where it is no text
        self._is_first = True  # nothing of the value was taken
        self._json: list[str] = []  # the arguments so far
        self._sent = 0  # pieces of them
        self._is_named = False  # a part has had the name

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        text, over = text[: MAX_CALL - self._size], text[MAX_CALL - self._size :]
        self._raw.append(text)
        self._size += len(text)
        self._buffer += text
        while (state := self._step()) is None:
            pass
        if state is ParserState.OPEN and self._size < MAX_CALL:
            return state, ""
        rest, self._buffer = self._buffer, ""
        self._raw = ["".join(self._raw).removesuffix(rest)]
        return (ParserState.BROKEN if state is ParserState.OPEN else state), rest + over

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        if self._function not in self._tools.names or self._sent == len(self._json):
            return None
        name, self._is_named = "" if self._is_named else self._function, True
        piece, self._sent = "".join(self._json[self._sent :]), len(self._json)
        return FoundPart(name, piece)

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the call."""
        try:
            arguments = compact(msgspec.json.decode("".join(self._json)))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return ()
        return () if arguments is None else (FoundCall(self._function, arguments),)

    def _opening(self) -> ParserState | None:
        return self._expect({FUNCTION: self._name})

    def _name(self) -> ParserState | None:
        name, state = self._until_bracket()
        if name:
            self._function, self._step = name, self._between
        return state

    def _between(self) -> ParserState | None:
        return self._expect({PARAMETER: self._parameter, END_FUNCTION: self._end})

    def _parameter(self) -> ParserState | None:
        name, state = self._until_bracket()
        if name:
            self._json.append(("{" if not self._json else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
            self._key, self._step, self._is_first = name, self._contents, True
            self._value.clear()
        return state

    def _contents(self) -> ParserState | None:
        """Takes the value up to its end; the line ends beside the tags are no part of it."""
        if self._is_first and not self._buffer:
            return ParserState.OPEN
        is_text = (self._function, self._key) not in self._tools.typed
        if self._is_first:
            self._buffer = self._buffer.removeprefix("\n")
            self._is_first = False
            self._json += ['"'] if is_text else []
        value, ended, rest = self._buffer.partition(END_PARAMETER)
        if ended:
            value = value.removesuffix("\n")
        else:
            held = _held(value, "\n" + END_PARAMETER)
            value, rest = value[: len(value) - held], value[len(value) - held :]
        self._buffer = rest
        if is_text:
            self._json.append(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if ended else ""))
        else:
            self._value.append(value)
            self._json += [_as_json("".join(self._value))] if ended else []
        if not ended:
            return ParserState.OPEN
        self._step = self._between
        return None

    def _end(self) -> ParserState:
        self._json.append("}" if self._json else "{}")
        return ParserState.DONE

    def _expect(self, tags: dict[str, object]) -> ParserState | None:
        """Goes on behind one of the tags; white space may precede it."""
        rest = self._buffer.lstrip()
        for tag, step in tags.items():
            if rest.startswith(tag):
                self._buffer = rest[len(tag) :]
                self._step = step  # type: ignore[assignment] # each is a step
                return None
        if any(tag.startswith(rest) for tag in tags):
            return ParserState.OPEN
        return ParserState.BROKEN

    def _until_bracket(self) -> tuple[str, ParserState | None]:
        """Returns a name that a bracket ends, taken from the buffer; "" and the state without one."""
        name, bracket, rest = self._buffer.partition(">")
        if not _NAME.match(name or " ") or len(name) > MAX_NAME:
            return "", ParserState.BROKEN
        if not bracket:
            return "", ParserState.OPEN
        if not name.strip():
            return "", ParserState.BROKEN
        self._buffer = rest
        return name.strip(), None


def _held(text: str, mark: str) -> int:
    """Returns the length of the end of `text` that may become `mark`, or the part of it behind its line end."""
    ends = (mark, mark[1:])
    return max(
        next((n for n in range(min(len(one) - 1, len(text)), 0, -1) if one.startswith(text[-n:])), 0) for one in ends
    )


def _as_json(text: str) -> str:
    """Returns a value that is no text by its schema as JSON; one that cannot be read is text."""
    text = text.strip()
    try:
        value = _WORDS[text] if text in _WORDS else msgspec.json.decode(text)
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
