"""Defines the frames between a grammar child process and its parent: a GrammarSetup, then GrammarJobs and answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import Constraint


class GrammarSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The vocabulary of the grammars, and the limit of memory."""

    tokenizer: str  # path of tokenizer.json
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_bytes: int  # of address space, in addition to the tokenizer's


class Reasoning(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Reasoning that may precede the constrained text. Marks are in a grammar's notation."""

    is_open: bool  # the prompt ended inside reasoning; else the output may open it
    opening: str
    closing: tuple[str, ...]  # the first of them ends it, the others follow
    answer: str = ""  # what precedes the constrained text


class ToolRule(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A call of one tool: two rules, and the arguments between them."""

    begin: str
    parameters: str  # JSON Schema of the arguments
    end: str


class TagRules(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The tags around each argument, in a grammar's notation."""

    key: str  # before the argument's name
    texts: str  # between the name and a text
    values: str  # between the name and any other value
    end: str  # behind the value
    more: str = ""  # behind that, where the end is a special token


class Calls(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Tool calls, instead of text or in it. Marks are in a grammar's notation."""

    tools: tuple[ToolRule, ...]
    opening: tuple[str, ...]  # before each call
    first: tuple[str, ...]  # before all calls
    last: str  # behind them
    separator: str  # between two calls
    tags: TagRules | None = None  # where the arguments are not JSON
    parallel: bool = True  # several calls are allowed
    is_required: bool = True  # nothing but calls; False: any text, in which calls are held to the schemas
    openings: tuple[tuple[str, str], ...] = ()  # marks that begin a call in any text, and in a grammar's notation
    answer: str = ""  # before a text without calls, where the two are messages of their own
    starts: str = ""  # characters with which a call without an opening begins, at the start of an output


class GrammarJob(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A constraint or tool calls to compile; exactly one of the two is set."""

    constraint: Constraint | None = None
    calls: Calls | None = None
    reasoning: Reasoning | None = None


class Compiled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grammar in llguidance's form: it compiles and can be followed within the limits."""

    grammar: str


class InvalidGrammar(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The source is not a valid grammar."""

    message: str  # what is wrong
    place: str = ""  # where


class UnsupportedGrammar(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grammar is valid but uses a feature that is not supported."""

    message: str
    place: str = ""


class TooComplex(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grammar exceeds a limit of memory, size or time."""


Answer: TypeAlias = Compiled | InvalidGrammar | UnsupportedGrammar | TooComplex
