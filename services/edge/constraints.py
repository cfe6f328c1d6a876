"""Converts the ways in which clients ask for a format of the answer to a constraint of sluice.v1. Pure."""

from collections.abc import Callable
from typing import Any

import msgspec
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import bad_request, unsupported
from sluice_server.services.edge.wire_parts import ResponseFormat, StructuredOutputs, encode

Schema = dict[str, Any] | str | bool


def of_response_format(asked: ResponseFormat) -> types_pb2.Constraint | None:
    """Returns the constraint of OpenAI's response_format; None for text. Raises EdgeError."""
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return types_pb2.Constraint(json_object=types_pb2.JsonObject())
    if asked.json_schema is None:
        raise bad_request("response_format.json_schema", "is missing")
    return types_pb2.Constraint(json_schema=encode("response_format", asked.json_schema.schema))


def of_schema(field: str) -> Callable[[Schema], types_pb2.Constraint | None]:
    """Returns the converter of a JSON schema in `field`, an object or its text."""

    def convert(schema: Schema) -> types_pb2.Constraint:
        return types_pb2.Constraint(json_schema=schema if isinstance(schema, str) else encode(field, schema))

    return convert


def of_regex(source: str) -> types_pb2.Constraint:
    """Returns the constraint of a regular expression."""
    return types_pb2.Constraint(regex=source)


def of_grammar(source: str) -> types_pb2.Constraint | None:
    """Returns the constraint of a grammar in GBNF; "" is none, as in llama.cpp."""
    return types_pb2.Constraint(grammar=source) if source else None


def of_choice(texts: list[str]) -> types_pb2.Constraint:
    """Returns the constraint of a list of texts, of which the answer is one."""
    return types_pb2.Constraint(choice=types_pb2.Choice(texts=texts))


def of_structured_outputs(asked: StructuredOutputs) -> types_pb2.Constraint | None:
    """Returns the constraint of vLLM's structured_outputs; None if it names none. Raises EdgeError."""
    field = "structured_outputs"
    for name, value in msgspec.structs.asdict(asked).items():
        if name in _NOT_BUILT and value:
            raise unsupported(f"{field}.{name}", "is not supported by this server: leave it out")
    found = [
        None if asked.json is None else of_schema(f"{field}.json")(asked.json),
        None if asked.regex is None else of_regex(asked.regex),
        None if asked.choice is None else of_choice(asked.choice),
        None if asked.grammar is None else of_grammar(asked.grammar),
        types_pb2.Constraint(json_object=types_pb2.JsonObject()) if asked.json_object else None,
    ]
    given = [one for one in found if one is not None]
    if len(given) > 1:
        raise bad_request(field, "names more than one format: send one of them")
    return given[0] if given else None


_NOT_BUILT = frozenset(
    ["structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"]
)
