"""What a process that compiles grammars and its parent say to each other: a Setup first, then Jobs with answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import Constraint


class GrammarSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose ids grammars are about."""

    tokenizer: str  # path of tokenizer.json
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_bytes: int  # of address space, beyond what the tokenizer takes


class Reasoning(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What may come before the constrained text. Marks are as a grammar writes them."""

    is_open: bool  # the prompt ended inside it; else it may be opened
    opening: str
    closing: str


class Calls(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Tool calls instead of text. Marks are as a grammar writes them; what is empty is not there."""

    tools: tuple[tuple[str, str], ...]  # name and JSON Schema of the arguments
    key: str  # of the arguments in a call
    opening: str
    closing: str
    separator: str  # between two calls


class GrammarJob(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A form to compile: one of constraint and calls."""

    constraint: Constraint | None = None
    calls: Calls | None = None
    reasoning: Reasoning | None = None


class Compiled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grammar in llguidance's form: it compiles and can be followed within the limits."""

    grammar: str


class InvalidGrammar(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It is none."""

    message: str  # what is wrong
    place: str = ""  # where


class UnsupportedGrammar(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It is right, but uses what is not supported."""

    message: str
    place: str = ""


class TooComplex(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It takes more than a grammar may."""


Answer: TypeAlias = Compiled | InvalidGrammar | UnsupportedGrammar | TooComplex
