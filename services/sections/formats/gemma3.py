"""Gemma 3: calls in a fence, ```tool_code with Python or ```json with JSON; or JSON or a list of calls alone.

Its template says nothing of tools, so that the form depends on the instructions; all forms that are in use are read.
"""

import json

import msgspec

from sluice_server.services.sections.json_call import JsonReader, call_of
from sluice_server.services.sections.python_call import PythonReader, python_calls
from sluice_server.services.sections.tool_format import (
    MAX_CALL,
    NAME,
    CallGrammar,
    CallReader,
    CharWise,
    FoundCall,
    FoundPart,
    Opened,
    ParserState,
    ToolFormat,
)

CODE, JSON, FENCE = "```tool_code", "```json", "```"
BARE = ('{"name"', '{"type"')
_IN_JSON = (*BARE, '[{"name"', '[{"type"')  # how JSON in a fence begins if it is a call, without white space
_LONGEST = max(map(len, _IN_JSON))


class FenceReader:
    """A reader of all text up to the end of a fence, fed with single characters."""

    def __init__(self, opened: Opened) -> None:
        self._is_json = opened.opening == JSON
        self._pieces: list[str] = []
        self._beginning = ""  # the first characters that are no white space

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return "".join(self._pieces)

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        self._pieces.append(text)
        if "".join(self._pieces[-len(FENCE) :]) == FENCE:
            return ParserState.DONE, ""
        if self._may_be_call(text):
            return ParserState.OPEN, ""
        return ParserState.BROKEN, self._pieces.pop()

    def part(self) -> FoundPart | None:
        """Returns None: arguments come whole."""
        return None

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the calls; none if the fence holds something else."""
        body = self.raw.removesuffix(FENCE).strip()
        return _json_calls(body) if body[:1] == "{" or body[:2] == "[{" else python_calls(body)

    def _may_be_call(self, text: str) -> bool:
        if len(self._pieces) > MAX_CALL:
            return False
        if self._is_json and len(self._beginning) < _LONGEST:
            self._beginning += text.strip()
            return any(one.startswith(self._beginning) or self._beginning.startswith(one) for one in _IN_JSON)
        return True


def _json_calls(body: str) -> tuple[FoundCall, ...]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()
    made = [call_of(one) for one in (value if isinstance(value, list) else [value])]
    return () if None in made else tuple([one for one in made if one is not None])


def _reader(opened: Opened) -> CallReader:
    if opened.opening:
        return CharWise(FenceReader(opened))
    return PythonReader(opened) if opened.first == "[" else JsonReader(opened, BARE)


GEMMA3 = ToolFormat(
    key="gemma3",
    name="gemma3",
    signs=("<start_of_turn>",),
    reader=_reader,
    openings=(CODE, JSON),
    bare=(*BARE, "["),
    separators=",",
    continues="{",
    grammar=CallGrammar(begin=('{"name": "', NAME, '", "parameters": '), end=("}",), starts="{["),
    instructions=(
        "If you decide to call a function, answer with nothing but a JSON object of this form:\n"
        + json.dumps({"name": "function name", "parameters": {"argument": "value"}})
    ),
)
