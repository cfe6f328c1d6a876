"""Each template gets the forms of content and tool calls that it reads."""

import pytest

from sluice_server.services.messages.work import ChatMessage, ChatPrompt, ToolCall
from sluice_server.services.tokenizer.control_tokens import ContentMarker
from sluice_server.services.tokenizer.template import Template
from sluice_server.services.tokenizer.template_forms import MessageForms, Messages, find_forms

CALL = ToolCall("f", '{"a": "<e>"}')
SOURCES = {
    "usual": (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",
        (0, 0, 0),
    ),
    "parts": (
        "{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        (1, 0, 0),
    ),
    "texts": (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments + '.' }}{% endfor %}"
        "{% endfor %}",
        (0, 1, 0),
    ),
    "texts beside none": (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '.' }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}",
        (0, 1, 1),
    ),
    "with tools only": (
        "{% for m in messages %}{{ m.content }}{% if tools %}{{ m.tool_calls }}{% endif %}{% endfor %}",
        (0, 0, 0),
    ),
}


def forms_of(source: str) -> MessageForms:
    return Template(source, {}, ContentMarker((), ())).forms


@pytest.mark.parametrize("name", list(SOURCES))
def test_the_form_is_one_that_the_template_writes(name: str) -> None:
    source, (parts, texts, none) = SOURCES[name]
    assert forms_of(source) == MessageForms(bool(parts), bool(texts), bool(none))


@pytest.mark.parametrize("name", ["usual", "parts", "texts", "texts beside none"])
def test_content_and_arguments_are_written_and_cut_in_every_form(name: str) -> None:
    template = Template(SOURCES[name][0], {}, ContentMarker(("<e>",), ()))
    messages = (ChatMessage("user", "said <e>"), ChatMessage("assistant", None, tool_calls=(CALL,)))
    text, cuts = template.render(ChatPrompt(messages), 1000)
    assert text.startswith("said <e>") and '"a": "<e>"' in text and len(cuts) == 2


def test_a_template_that_fails_on_every_probe_gets_the_usual_forms() -> None:
    given: list[Messages] = []

    def fail(messages: Messages, tools: object) -> str:
        given.append(messages)
        return ""

    assert find_forms(fail) == MessageForms()
    assert len(given) == 2 * 2 + 2 * 4
