"""Defines what a format of tool calls consists of: its marks, its reader, its grammar. Pure."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

MAX_CALL = 256 << 10  # characters; a longer call is text
MAX_DEPTH = 500  # of objects and lists; a deeper call is text, because Python versions differ in their limit

# Segments of a `CallGrammar` that stand for something; all others are text, or a special token by its text.
NAME = "\0name"  # the tool's name
NEWLINE = "\0newline"  # a line end, or nothing
NUMBER = "\0number"  # the call's number


class ParserState(enum.Enum):
    """The state of a reader: more text needed, complete, or not a call."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class FoundCall(NamedTuple):
    """A tool call of the model, with its arguments as compact JSON."""

    name: str
    arguments: str  # a JSON object


class FoundPart(NamedTuple):
    """A further piece of the arguments of a call that is still being written; `name` with the first piece only."""

    name: str
    arguments: str


class CallReader(Protocol):
    """Reads one tool call, or one list of them, from the text behind an opening."""

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        ...

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed: behind the call, or from where it broke."""
        ...

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one; None without one."""
        ...

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the calls of a reader that is done; none if what was read is not a call."""
        ...


class CharWise:
    """A reader that gives each character on alone, so that it breaks at the same one for any division into pieces."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return self._reader.raw

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        for at, char in enumerate(text):
            state, rest = self._reader.feed(char)
            if state is not ParserState.OPEN:
                return state, rest + text[at + 1 :]
        return ParserState.OPEN, ""

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        return self._reader.part()

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the calls."""
        return self._reader.calls()


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request, as readers need them.

    Attributes:
        names: of all tools.
        typed: (tool, argument) → for arguments that are not texts; needed where a format writes all values as text.
    """

    names: frozenset[str] = frozenset()
    typed: frozenset[tuple[str, str]] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """Where a reader begins.

    Attributes:
        opening: the mark before the text; "" at the start of an output without one.
        first: the first character of the text, where there is no opening.
        tools: the tools of the request.
        marks: other texts by which marks of the format appear (special tokens).
    """

    opening: str
    first: str
    tools: Tools
    marks: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The tags of a call that writes each argument as a text between tags.

    Attributes:
        function: before the function's name; "" where the name is the first text.
        named: behind it; "" where a line end or the next tag ends the name.
        end: behind the arguments.
        key: before an argument's name.
        texts: behind the name of an argument that is a text; white space may stand between two of them.
        values: behind the name of any other; the same where only the tool's schema says which it is.
        value_end: behind the value.
        has_lines: a line end before the value, and one behind it, belong to the tags.
    """

    function: str
    named: str
    end: str
    key: str
    texts: tuple[str, ...]
    values: tuple[str, ...]
    value_end: str
    has_lines: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a model is made to write calls. All but `separator` are segments: texts, special tokens, NAME and the others.

    Attributes:
        opening: before each call. With tools that are strict its first segment is what begins a call in free text.
        begin: from there to the arguments.
        end: behind the arguments.
        first, last: around all calls.
        separator: between two calls.
        answer: before a text without calls, where calls and text are messages of their own.
        starts: characters with which a call without an opening begins, at the start of an output only.
        tags: of the arguments, where they are not JSON.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    separator: str = "\n"
    answer: tuple[str, ...] = ()
    starts: str = ""
    tags: ArgumentTags | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls.

    Attributes:
        key: the format's name within the server.
        name: its name as an option, as vLLM has it. Several formats may share one: the template's signs decide.
        signs: a template that contains one of them uses this format.
        openings: texts before a call; may be special tokens.
        closings: texts that may follow calls.
        others: further special tokens that the reader needs to see.
        bare: how a call without an opening may begin, without white space, at the start of an output; empty if an
            opening is required.
        separators: characters that may stand between two calls, besides white space.
        continues: characters with which a further call may begin without an opening.
        reader: makes a reader.
        grammar: how the format is enforced; None: calls that are required are written as JSON instead.
        instructions: tells a model how to write calls, for templates that say nothing of tools.
        has_texts: all values are written as text, so that the tools' schemas say which are something else.
    """

    key: str
    name: str
    signs: tuple[str, ...]
    reader: Callable[[Opened], CallReader]
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    separators: str = ""
    continues: str = ""
    grammar: CallGrammar | None = None
    instructions: str = ""
    has_texts: bool = False
