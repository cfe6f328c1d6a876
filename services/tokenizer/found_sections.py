"""Derives the sections of a chat's output from its template: formats of tool calls and reasoning. Pure."""

from typing import Any, NamedTuple

import msgspec

from sluice_server.services.messages.work import ChatPrompt, Sections, Tool
from sluice_server.services.sections.formats.hermes import HERMES
from sluice_server.services.sections.formats.json_lists import JSON
from sluice_server.services.sections.reasoning import ReasoningFormat, is_left_open, is_open, reasoning_format
from sluice_server.services.sections.tool_format import ToolFormat
from sluice_server.services.sections.tools import AUTO, NONE, tool_format
from sluice_server.services.tokenizer.render_frames import Rendered


class Parsers(NamedTuple):
    """The operator's choice of formats: names, auto or none."""

    tools: str = AUTO
    reasoning: str = AUTO


DETECTED = Parsers()


def placed_format(template: str, parsers: Parsers) -> ToolFormat | None:
    """Returns the format in which a model is to write calls where its template leaves tools out.

    None if the operator wants no calls, or the format is one that only a template can ask for.
    """
    if parsers.tools == NONE:
        return None
    known = tool_format(template, parsers.tools) or HERMES
    return known if known.instructions else None


def sections_of(template: str, prompt: ChatPrompt, rendered: Rendered, parsers: Parsers) -> Sections:
    """Returns the sections that an output for a rendered prompt may have."""
    find = placed_format if rendered.are_tools_placed else _shown_format
    known = find(template, parsers) if prompt.tools else None
    reasoning = reasoning_format(template, parsers.reasoning)
    return Sections(
        reasoning=reasoning.key if reasoning is not None else "",
        is_reasoning=reasoning is not None and _is_reasoning(reasoning, prompt, rendered, parsers),
        tools=_key(known, prompt),
        parallel=prompt.parallel,
        names=tuple([tool.name for tool in prompt.tools]),
        typed=_typed(prompt.tools) if known is not None and known.has_texts else (),
    )


def _is_reasoning(row: ReasoningFormat, prompt: ChatPrompt, rendered: Rendered, parsers: Parsers) -> bool:
    """Whether the output begins inside reasoning."""
    if prompt.continue_final_message:
        return is_left_open(row, prompt.messages[-1].content or "")
    return is_open(row, rendered.text, is_chosen=parsers.reasoning != AUTO)


def _shown_format(template: str, parsers: Parsers) -> ToolFormat | None:
    return tool_format(template, parsers.tools)


def _key(known: ToolFormat | None, prompt: ChatPrompt) -> str:
    """Returns the format's key; a required call is written as JSON where there is no format that can be enforced."""
    if prompt.must_call and (known is None or known.grammar is None):
        return JSON
    return known.key if known is not None else ""


def _typed(tools: tuple[Tool, ...]) -> tuple[tuple[str, str], ...]:
    """Returns (tool, argument) of the arguments whose schema allows other values than texts."""
    found = []
    for tool in tools:
        properties = msgspec.json.decode(tool.parameters).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            if not is_text(schema):
                found.append((tool.name, name))
    return tuple(found)


def is_text(schema: Any) -> bool:  # noqa: ANN401 # any JSON value
    """Returns True if a schema describes texts only, or says nothing of types."""
    if not isinstance(schema, dict):
        return True
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    if isinstance(values := schema.get("enum"), list):
        return all(isinstance(one, str) for one in values)
    return not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "const"))
