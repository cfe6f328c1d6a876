"""Lists how models write tool calls, and detects the format that a chat template uses.

A call is a JSON object with the tool's name and its arguments as an object. Pure: no state.
"""

import dataclasses

REASONING = ("<think>", "</think>")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls.

    Attributes:
        signs: a template that contains one of them uses this format.
        opening: the text before a call; may be a special token.
        closing: the text after a call, or "".
        bare: how a call without an opening may begin, without white space, at the start of an output; empty if the
            opening is required.
        separators: characters that may stand between two calls, besides white space.
        arguments: keys that may hold the arguments.
        writes: the key among `arguments` that the model writes.
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
    """Returns the name of the format that a template's source uses; "" if none is known."""
    return next((name for name, known in FORMATS.items() if any(sign in template for sign in known.signs)), "")


def has_reasoning(template: str) -> bool:
    """Returns True if a template's source has reasoning sections."""
    return REASONING[1] in template


def is_reasoning(prompt: str) -> bool:
    """Returns True if a rendered prompt ends inside a reasoning section."""
    return prompt.rstrip().endswith(REASONING[0])
