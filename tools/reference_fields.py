"""Makes the page of the HTTP edge's fields from its table."""

from itertools import groupby

import msgspec

from sluice_server.services.edge.field_table import FORMATS, OUTPUTS, PROMPTS, SAMPLING, SCHEDULING
from sluice_server.services.edge.fields import BOTH, Label, Own, Row, Sent, Unbuilt
from sluice_server.services.edge.openai_fields import OPENAIS

HEAD = """<!-- Written by tools/reference.py, never by hand. -->
# Fields of the HTTP edge

What becomes of each field in the bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's, and those that vLLM,
SGLang and llama.cpp add. Paths are those of a `GenerationSpec` in the [contract](contract.md). null is the same as
absence. A field that is not listed is refused by its name, except within messages, their parts and their tool calls,
where clients send back what they got. Two fields that go to one path must say the same. Errors name the fields of this
page: of several for one path that which was sent.
"""
UNBUILT = """
## Not built

These are refused unless they say what is the case anyway.

| Field | of | Taken | Otherwise |
| --- | --- | --- | --- |
"""
SECTIONS = (
    ("OpenAI's", OPENAIS),
    ("Sampling and stopping", SAMPLING),
    ("Format of the answer", FORMATS),
    ("The prompt", PROMPTS),
    ("What is told", OUTPUTS),
    ("Scheduling and labels", SCHEDULING),
)


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for title, rows in SECTIONS:
        taken = [f"| {_name(row)} | {row.origin} | {_effect(row)} |\n" for row in rows if not isinstance(row, Unbuilt)]
        if taken:
            parts.append(f"\n## {title}\n\n| Field | of | Effect |\n| --- | --- | --- |\n" + "".join(taken))
    unbuilt = [row for _, rows in SECTIONS for row in rows if isinstance(row, Unbuilt)]
    merged = groupby(unbuilt, key=lambda row: (row.origin, row.routes, row.neutral, row.instead))
    lines = ["| {} | {} | {} | {} |\n".format(*_unbuilt(list(group))) for _, group in merged]
    return "".join([*parts, UNBUILT, *lines])


def _unbuilt(rows: list[Unbuilt]) -> tuple[str, str, str, str]:
    first = rows[0]
    taken = ", ".join(f"`{_json(value)}`" for value in first.neutral)
    return ", ".join(map(_name, rows)), first.origin, taken, first.instead


def _name(row: Row) -> str:
    return f"`{row.name}`" if row.routes == BOTH else f"`{row.name}` ({', '.join(sorted(row.routes))})"


def _effect(row: Row) -> str:
    match row:
        case Sent():
            return f"`{row.path}`" + (f"; {row.note}" if row.note else "")
        case Label():
            return f"none: {row.note}"
        case Own():
            return row.note
        case Unbuilt():
            return row.instead


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
