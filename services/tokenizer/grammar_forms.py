"""Converts constraints from the forms in which clients write them to llguidance's form. Pure; compiles nothing.

Schemas, expressions and GBNF come from clients, so this runs only in `grammar_child`, where time and memory are
limited.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.tokenizer.call_grammars import calls_grammars, until
from sluice_server.services.tokenizer.grammar_errors import FormError
from sluice_server.services.tokenizer.grammar_frames import GrammarJob, Reasoning

# Between JSON's tokens: nothing, a space, or line ends and an indent. JSON allows more; weak models then never stop.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
_ESCAPE = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")


def grammar_of(job: GrammarJob) -> str:
    """Returns the grammar of a job as llguidance's JSON. Raises FormError, RecursionError."""
    grammars = calls_grammars(job.calls, schema_of) if job.calls is not None else [constraint_grammar(job.constraint)]
    if job.reasoning is not None:
        grammars = [{"lark_grammar": _reasoning(job.reasoning)}, {**grammars[0], "name": "body"}, *grammars[1:]]
    return json.dumps({"grammars": grammars})


def constraint_grammar(constraint: Constraint | None) -> dict[str, Any]:
    """Returns one entry of llguidance's list of grammars. Raises FormError, RecursionError."""
    assert constraint is not None
    match constraint.form:
        case ConstraintForm.JSON_SCHEMA:
            return {"json_schema": schema_of(constraint.source)}
        case ConstraintForm.REGEX:
            return {"lark_grammar": f"start: /{regex_to_lark(constraint.source, '')}/"}
        case ConstraintForm.GRAMMAR:
            return {"lark_grammar": _lark(constraint.source)}
        case ConstraintForm.CHOICE:
            return {"lark_grammar": "start: " + " | ".join(_literal(text) for text in constraint.choices)}


def schema_of(text: str, *, is_object: bool = False) -> dict[str, Any]:
    """Parses a JSON Schema and adds the server's options; with `is_object` it must describe objects.

    Raises FormError, RecursionError.
    """
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormError(f"is not JSON: {error.msg}", f"line {error.lineno}, column {error.colno}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise FormError("is no JSON Schema: it must be an object")
    if is_object and schema.setdefault("type", "object") != "object":
        raise FormError("must describe an object")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def _reasoning(reasoning: Reasoning) -> str:
    """Returns a grammar of free text up to the closing mark of reasoning, then the constrained body."""
    closing, *more = reasoning.closing
    body = f"{reasoning.answer} @body"
    inside = f"reasoning: inside {' '.join(more)} /\\n{{0,2}}/\n{until(closing, 'inside')}\n"
    if reasoning.is_open:
        return f"start: reasoning {body}\n{inside}"
    return f"start: ({reasoning.opening} reasoning)? {body}\n{inside}"


def _lark(gbnf: str) -> str:
    try:
        return gbnf_to_lark(_ESCAPE.sub(_unescaped, gbnf))
    except Exception as error:  # the converter has no exception class of its own for most errors
        if isinstance(error, RecursionError | MemoryError):
            raise
        message, _, place = str(error).partition(" at line ")
        raise FormError(message or "is no GBNF", place and f"line {place}") from error


def _unescaped(match: re.Match[str]) -> str:
    r"""Writes \u0041 as \x41 where it is ASCII, else as the character, because the converter drops leading zeros."""
    code = int(match.group(1) or match.group(2), 16)
    if code < 128:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match.group()


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def place_of(schema: dict[str, Any], error: str, max_tries: int = 300) -> str:
    """Returns the JSON pointer of the innermost part of a schema that fails with this error; "" for the whole."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pointer, part, tries = "", schema, 0
    while True:
        for path, inner in _parts(part):
            tries += 1
            if tries > max_tries:
                return pointer
            if _refusal({**shared, **inner}) == error:
                pointer, part = pointer + path, inner
                break
        else:
            return pointer


def _parts(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the schemas directly inside a schema, with the pointers to them."""
    found: list[tuple[str, Any]] = []
    for key in ("$defs", "definitions", "properties", "patternProperties"):  # definitions first, then their uses
        named = schema.get(key)
        found += [(f"/{key}/{_escaped(name)}", one) for name, one in named.items()] if isinstance(named, dict) else []
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        listed = schema.get(key)
        found += [(f"/{key}/{at}", one) for at, one in enumerate(listed)] if isinstance(listed, list) else []
    found += [(f"/{key}", schema.get(key)) for key in ("items", "additionalProperties", "contains", "not")]
    return [(path, one) for path, one in found if isinstance(one, dict)]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refusal(schema: dict[str, Any]) -> str:
    return LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))
