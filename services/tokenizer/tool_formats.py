"""How models write tool calls: a table, and which of it a chat template speaks.

A call is a JSON object with the tool's name and its arguments as an object. Pure; knows no stream.
"""

import dataclasses

REASONING = ("<think>", "</think>")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        signs: a template that holds one of them speaks it.
        opening: what comes before a call; it may be a special token.
        closing: what comes after, or "".
        bare: how a call may begin, without white space, where an output begins with one and has no opening; empty if
            it must have one.
        separators: what may stand between two calls, besides white space.
        arguments: keys that may hold the arguments.
        writes: the one of them under which the model writes them.
    """

    name: str
    signs: tuple[str, ...]
    opening: str
    closing: str = ""
    bare: tuple[str, ...] = ()
    separators: str = ""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    writes: str = "arguments"


FORMATS = {
    known.name: known
    for known in (
        ToolFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>"),  # Hermes, Qwen 2.5 and 3
        ToolFormat(
            "llama3",
            ("<|python_tag|>", "ipython"),
            "<|python_tag|>",
            bare=('{"name"', '{"type"'),
            separators=";",
            writes="parameters",
        ),
    )
}


def tool_format(template: str) -> str:
    """Name of the format that a template's source speaks; "" if none is known."""
    return next((name for name, known in FORMATS.items() if any(sign in template for sign in known.signs)), "")


def has_reasoning(template: str) -> bool:
    """Whether a template's source knows sections of reasoning."""
    return REASONING[1] in template


def is_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside such a section."""
    return prompt.rstrip().endswith(REASONING[0])
