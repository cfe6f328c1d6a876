"""Leaves the last message of a chat open, as transformers does: the text ends where that message's content ends. Pure.

A mark is put behind the content before a template runs. It is a lone surrogate, which no valid text has, and which
stands for no character of content (see `control_tokens`). The blank behind it shows whether the template trims content.
"""

from typing import Any

from jinja2 import TemplateError

MARK = chr(0xDFFF)
_TAG = f"{MARK} "


class ClosedError(TemplateError):
    """A template left out the content of the last message, or a part of it."""


def opened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with a mark behind the last one's content."""
    *earlier, last = messages
    return [*earlier, {**last, "content": last["content"] + _TAG}]


def end_of(text: str, content: str) -> int:
    """Returns where a rendered text ends behind `content`. Raises ClosedError."""
    at = text.rfind(MARK)
    if at < 0 or content.strip() not in text:
        raise ClosedError
    # A template that trims content has trimmed the mark's blank, and would have trimmed the content's own.
    return at if text.startswith(_TAG, at) else len(text[:at].rstrip())


def without_marks(text: str) -> str:
    """Returns a text without the marks that a template wrote more than once."""
    return text.replace(_TAG, "").replace(MARK, "")
