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
    closing: str


class Calls(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Tool calls instead of text. Marks are in a grammar's notation; an empty one is omitted."""

    tools: tuple[tuple[str, str], ...]  # name, and JSON Schema of the arguments
    key: str  # the key of the arguments in a call
    opening: str
    closing: str
    separator: str  # between two calls


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
