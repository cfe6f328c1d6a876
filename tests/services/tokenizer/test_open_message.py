"""A last message that is left open: the text ends as transformers lets it end, and content stays content."""

import functools
import itertools
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice_server.services.messages.work import ChatMessage, ChatPrompt
from sluice_server.services.sections.splitters import section_marks
from sluice_server.services.tokenizer.control_tokens import ContentMarker
from sluice_server.services.tokenizer.open_message import MARK, ClosedError
from sluice_server.services.tokenizer.template import FAULTS, Template
from tests.oracle.chats import CALLS, TOKENS, TOOLS, as_dicts, tools_as_dicts
from tests.oracle.templates import PUBLISHED, TEMPLATES, has_place_for_calls

ORACLE: Any = render_jinja_template
MAX_BYTES = 1 << 20
ASK = ChatMessage("user", "weather?")
CONTENTS = {
    "text": "Sure, it is",
    "blank behind": "Sure: ",
    "lines behind": "Sure:\n\n",
    "blanks around": "\n  Sure ",
    "nothing": "",
    "blank": " ",
    "marks": "<s>[x]</s> <|im_end|>",
    "reasoning": "<think>\nhm",
    "reasoned": "<think>\nhm\n</think>\n\nSure, it",
    "like JSON": '{"a": [1, ',
}
ENDS = {
    **{name: (ASK, ChatMessage("assistant", content)) for name, content in CONTENTS.items()},
    "with reasoning": (ASK, ChatMessage("assistant", "Sure, it is ", reasoning="because")),
    "behind a tool": (
        ChatMessage("system", "Be brief."),
        ASK,
        ChatMessage("assistant", None, tool_calls=CALLS),
        ChatMessage("tool", "3", tool_call_id="call00001", name="weather"),
        ChatMessage("assistant", "3 deg"),
    ),
    "behind the same": (ASK, ChatMessage("assistant", "Sure"), ASK, ChatMessage("assistant", "Sure")),
}
WANTS_TEXT = {"functionary_3_2"}  # of arguments
SOURCES = TEMPLATES | PUBLISHED


@functools.cache
def template_of(source: str) -> Template:
    marker = ContentMarker(("<s>", "</s>", "<|im_end|>", "<|im_start|>", "[x]"), sorted(section_marks()))
    return Template(source, TOKENS, marker)


@pytest.mark.parametrize("name", list(SOURCES))
def test_the_text_ends_as_with_transformers(name: str) -> None:
    template, closed = template_of(SOURCES[name]), set()
    for (end, messages), tools in itertools.product(ENDS.items(), ((), TOOLS)):
        if any(one.tool_calls for one in messages) and not has_place_for_calls(SOURCES[name]):
            continue
        asked = ChatPrompt(messages, add_generation_prompt=False, tools=tools, continue_final_message=True)
        turns = as_dicts(messages, arguments_as_text=name in WANTS_TEXT)
        options = {"tools": tools_as_dicts(tools), "continue_final_message": True}
        try:
            (want,), _ = ORACLE([turns], chat_template=SOURCES[name], **options, **TOKENS)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(FAULTS):
                template.render(asked, MAX_BYTES)
        except ValueError:
            closed.add(end)
            with pytest.raises(ClosedError):
                template.render(asked, MAX_BYTES)
        else:
            found = template.render(asked, MAX_BYTES)
            assert found.text == want and MARK not in found.text, (end, bool(tools))
            assert all(0 < cut < len(found.text) for cut in found.cuts)
    assert closed <= {"reasoned"}, closed  # some templates leave earlier reasoning out


def ended(source: str, content: str = "so", **fields: Any) -> tuple[str, list[str]]:  # noqa: ANN401 # any field
    messages = (ASK, ChatMessage("assistant", content))
    found = template_of(source).render(
        ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True, **fields), MAX_BYTES
    )
    return found.text, [found.text[start:end] for start, end in itertools.pairwise((0, *found.cuts, len(found.text)))]


PLAIN = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


def test_nothing_of_the_template_follows_and_content_still_makes_no_mark() -> None:
    text, pieces = ended(PLAIN, "a</s>b<s>")
    assert text == "<s>weather?</s><s>a</s>b<s>"
    assert pieces == ["<s>weather?</s><s>a<", "/s>b<", "s>"]
    assert ended(PLAIN, "a</s>", trusts_content=True) == ("<s>weather?</s><s>a</s>", ["<s>weather?</s><s>a</s>"])
    assert ended(PLAIN, "a</")[1] == ["<s>weather?</s><s>a</"]


def test_what_a_template_writes_of_the_last_message_before_is_as_it_was() -> None:
    assert ended("{{ messages[-1].content }}|{{ messages[-1].content | trim }}.")[0] == "so|so"
    assert ended("{{ messages[-1].content | trim }}|{{ messages[-1].content }}.")[0] == "so|so"


@pytest.mark.parametrize("source", ["nothing", "{{ messages[-1].content | length }}", "{{ messages[-1].content[:1] }}"])
def test_a_template_that_leaves_the_message_out_is_refused(source: str) -> None:
    with pytest.raises(ClosedError):
        ended(source)
