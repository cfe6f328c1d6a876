"""Reads a call with a tag for each argument: <function=f><parameter=a>…</parameter></function>. Pure.

Values are text. Where the tags do not say which one is JSON, those are that the tool's schema describes as no text.
Texts are streamed.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping

import msgspec

from sluice_server.services.sections.json_call import compact
from sluice_server.services.sections.split import may_become
from sluice_server.services.sections.tool_format import (
    MAX_CALL,
    ArgumentTags,
    CallReader,
    FoundCall,
    FoundPart,
    Opened,
    ParserState,
)

MAX_NAME = 256  # characters of a name
_NAME = re.compile(r"[^<>\n]*\Z")
_BARE_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{0,64})[ \t\r]*")  # where no tag is before it
_WORDS = {"True": True, "False": False, "None": None}  # as models write them that know Python


class XmlReader:
    """A reader of one function with its parameters."""

    def __init__(self, opened: Opened, tags: ArgumentTags) -> None:
        self._tools = opened.tools
        self._tags = _as_seen(tags, opened.marks)
        self._raw: list[str] = []
        self._size = 0
        self._buffer = ""  # consumed, and not understood yet
        is_opened = tags.function and opened.opening == tags.function
        self._step = (self._name if is_opened else self._opening) if tags.function else self._bare_name
        self._function = ""
        self._key = ""
        self._is_text = True  # the parameter being read
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
        return self._expect({self._tags.function: self._name})

    def _name(self) -> ParserState | None:
        name, _, state = self._until((self._tags.named,))
        if name:
            self._function, self._step = name, self._between
        return state

    def _bare_name(self) -> ParserState | None:
        """Takes a name that a line end or a tag ends."""
        found = _BARE_NAME.match(self._buffer)
        assert found is not None  # it matches everywhere
        rest = self._buffer[found.end() :]
        if not rest:
            return ParserState.OPEN
        if not found[1] or not (rest[0] == "\n" or rest[0] in (self._tags.key[0], self._tags.end[0])):
            return ParserState.BROKEN
        self._function, self._buffer, self._step = found[1], rest, self._between
        return None

    def _between(self) -> ParserState | None:
        return self._expect({self._tags.key: self._parameter, self._tags.end: self._end})

    def _parameter(self) -> ParserState | None:
        texts, values = self._tags.texts, self._tags.values
        name, mark, state = self._until((texts[0], values[0]))
        if name:
            self._json.append(("{" if not self._json else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
            self._key, self._step, self._is_first = name, self._contents if len(texts) == 1 else self._value_tag, True
            self._is_text = mark == texts[0] if texts != values else (self._function, name) not in self._tools.typed
            self._value.clear()
        return state

    def _value_tag(self) -> ParserState | None:
        return self._expect({self._tags.texts[1]: self._contents})

    def _contents(self) -> ParserState | None:
        """Takes the value up to its end."""
        if self._is_first and not self._buffer:
            return ParserState.OPEN
        line = "\n" if self._tags.has_lines else ""
        if self._is_first:
            self._buffer = self._buffer.removeprefix(line)
            self._is_first = False
            self._json += ['"'] if self._is_text else []
        value, ended, rest = self._buffer.partition(self._tags.value_end)
        if ended:
            value = value.removesuffix(line)
        else:
            held = _held(value, (line + self._tags.value_end, self._tags.value_end))
            value, rest = value[: len(value) - held], value[len(value) - held :]
        self._buffer = rest
        if self._is_text:
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

    def _until(self, marks: tuple[str, ...]) -> tuple[str, str, ParserState | None]:
        """Returns a name that one of the marks ends, and that mark, taken from the buffer; "" and the state without.

        The marks begin with the same character, which no name has.
        """
        name, found, _ = self._buffer.partition(marks[0][0])
        rest = self._buffer[len(name) :]
        if not _NAME.match(name or " ") or len(name) > MAX_NAME:
            return "", "", ParserState.BROKEN
        if not found or (name.strip() and may_become(rest, marks)):
            return "", "", ParserState.OPEN
        mark = next((one for one in marks if rest.startswith(one)), "")
        if not mark or not name.strip():
            return "", "", ParserState.BROKEN
        self._buffer = rest[len(mark) :]
        return name.strip(), mark, None


def xml_reader(tags: ArgumentTags) -> Callable[[Opened], CallReader]:
    """Returns what makes readers of a form with these tags."""
    return lambda opened: XmlReader(opened, tags)


def _as_seen(tags: ArgumentTags, marks: Mapping[str, str]) -> ArgumentTags:
    """Returns the tags as they appear in the text."""
    if not marks:
        return tags
    return dataclasses.replace(
        tags,
        function=marks.get(tags.function, tags.function),
        end=marks.get(tags.end, tags.end),
        key=marks.get(tags.key, tags.key),
        texts=tuple([marks.get(one, one) for one in tags.texts]),
        values=tuple([marks.get(one, one) for one in tags.values]),
        value_end=marks.get(tags.value_end, tags.value_end),
    )


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Returns the length of the end of `text` that may become one of the marks."""
    return max(
        next((n for n in range(min(len(one) - 1, len(text)), 0, -1) if one.startswith(text[-n:])), 0) for one in marks
    )


def _as_json(text: str) -> str:
    """Returns a value that is no text by its schema as JSON; one that cannot be read is text."""
    text = text.strip()
    try:
        value = _WORDS[text] if text in _WORDS else msgspec.json.decode(text)
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
