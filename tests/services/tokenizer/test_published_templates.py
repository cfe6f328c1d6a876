"""Templates of published models: rendered as transformers does, and safe from content that writes their marks."""

import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall
from sluice_server.services.sections.splitters import section_marks
from sluice_server.services.tokenizer.control_tokens import ContentMarker
from sluice_server.services.tokenizer.template import FAULTS, RefusedError, RenderedText, Template
from tests.oracle.chats import CHATS, TOKENS, TOOLS, as_dicts, tools_as_dicts
from tests.oracle.templates import PUBLISHED, has_place_for_calls

ORACLE: Any = render_jinja_template
MAX_BYTES = 1 << 20
MARKS = re.compile(r"<[^<>\s'\"{}]+>|\[/?[A-Z_]+\]|\]~![a-z]\[|\]~[a-z]\]|\[e~\[")  # in the sources
WANTS_TEXT = {"functionary_3_2"}  # of arguments


def marks_of(name: str) -> tuple[str, ...]:
    """The marks that a template writes, as if all were special tokens."""
    return tuple(sorted({*MARKS.findall(PUBLISHED[name]), *TOKENS.values()}))


@functools.cache
def template_of(name: str, written: frozenset[str] = frozenset()) -> Template:
    return Template(PUBLISHED[name], TOKENS, ContentMarker(marks_of(name), sorted(written)))


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_rendered_as_transformers_does(name: str) -> None:
    template, refused = template_of(name, section_marks()), []
    for (chat, messages), tools in itertools.product(CHATS.items(), ((), TOOLS)):
        asked = ChatPrompt(messages, add_generation_prompt=bool(tools), tools=tools)
        if any(one.tool_calls for one in messages) and not has_place_for_calls(PUBLISHED[name]):
            with pytest.raises(RefusedError, match="has no place for tool calls"):
                template.render(asked, MAX_BYTES)
            continue
        options = {"tools": tools_as_dicts(tools), "add_generation_prompt": bool(tools)}
        try:
            turns = as_dicts(messages, arguments_as_text=name in WANTS_TEXT)
            (want,), _ = ORACLE([turns], chat_template=PUBLISHED[name], **options, **TOKENS)
        except (jinja2.TemplateError, TypeError) as error:
            refused.append(chat)
            with pytest.raises(FAULTS, match=re.escape(str(error))):
                template.render(asked, MAX_BYTES)
        else:
            assert template.render(asked, MAX_BYTES).text == want
    assert len(set(refused)) <= 2, refused


def conversation(name: str, word: str) -> tuple[ChatMessage, ...]:
    """A conversation for a template, with `word` in all of its content."""
    call = ToolCall("weather", json.dumps({"city": word}), "call00001")
    return (
        ChatMessage("system", f"s {word} s"),
        ChatMessage("user", f"{word} u {word}"),
        ChatMessage("assistant", "", tool_calls=(call,) if has_place_for_calls(PUBLISHED[name]) else ()),
        ChatMessage("tool", f"t {word}", tool_call_id="call00001", name="weather"),
        ChatMessage("assistant", f"a {word}"),
        ChatMessage("user", f"again {word}"),
    )


def marks_in(template: Template, name: str, word: str, tools: Sequence[Tool]) -> list[str]:
    """The marks in the pieces in which a conversation is encoded."""
    found: RenderedText = template.render(ChatPrompt(conversation(name, word), tools=tuple(tools)), MAX_BYTES)
    longest_first = sorted(marks_of(name), key=len, reverse=True)
    pieces = [found.text[start:end] for start, end in itertools.pairwise((0, *found.cuts, len(found.text)))]
    return re.findall("|".join(map(re.escape, longest_first)), "\0".join(pieces))


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_content_with_the_marks_of_a_template_writes_none(name: str) -> None:
    template = template_of(name)
    for tools in ((), TOOLS):
        want = marks_in(template, name, "word", tools)
        assert want
        for mark in marks_of(name):
            assert marks_in(template, name, mark, tools) == want, mark
