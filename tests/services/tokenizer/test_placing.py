"""Tools reach the model also where its template has no place for them; if they cannot, the request is refused."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.found_sections import DETECTED, Parsers
from tests.oracle.templates import PUBLISHED, TEMPLATES

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
)
SHOWS = "{% if tools %}{{ tools }}{% endif %}" + PLAIN
DROPS_ALL = "{{ messages | length }}"
TOOLS = (Tool("f", "It does.", '{"type": "object", "properties": {"a": {"type": "string"}}}'),)
ASK = (ChatMessage("user", "hi"),)


@contextmanager
def loaded(source: str, parsers: Parsers = DETECTED) -> Iterator[ChatTemplate]:
    template = ChatTemplate(TemplateSource(source), parsers=parsers)
    try:
        yield template
    finally:
        template.close()


def rendered(source: str, prompt: ChatPrompt, parsers: Parsers = DETECTED) -> tuple[str, str]:
    """The prompt as text, and the format in which calls are looked for."""
    with loaded(source, parsers) as template:
        made = template.render(prompt, 1 << 16)
        return made.text, template.sections(prompt, made).tools


@pytest.mark.parametrize(("source", "role"), [(PLAIN, "system"), (NO_SYSTEM, "user"), (DROPS_SYSTEM, "user")])
def test_tools_are_told_in_a_turn_that_the_template_shows(source: str, role: str) -> None:
    text, key = rendered(source, ChatPrompt(ASK, tools=TOOLS))
    told, _, rest = text.partition("\n\nTo call")
    assert told.startswith(f"<{role}>You may call") and json.loads(told.splitlines()[1])["name"] == "f"
    assert "<tool_call>" in rest and key == "hermes" and text.count("hi\n") == 1
    assert rendered(source, ChatPrompt(ASK)) == ("<user>hi\n", "")


def test_what_the_system_says_stays_first() -> None:
    text, _ = rendered(PLAIN, ChatPrompt((ChatMessage("system", "Be brief."), *ASK), tools=TOOLS))
    assert text.startswith("<system>Be brief.\n\nYou may call") and text.endswith("\n<user>hi\n")


def test_calls_and_answers_become_text() -> None:
    calls = (ToolCall("f", '{"a": "b"}', "1"), ToolCall("f", "{}", "2"))
    turns = (*ASK, ChatMessage("assistant", None, tool_calls=calls), ChatMessage("tool", "3"), ChatMessage("tool", "4"))
    text, _ = rendered(PLAIN, ChatPrompt(turns, tools=TOOLS))
    assert text.endswith(
        '<assistant><tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        "<user><tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\n"
    )


def test_a_template_that_shows_tools_is_left_alone() -> None:
    text, key = rendered(SHOWS, ChatPrompt(ASK, tools=TOOLS))
    assert "You may call" not in text and "It does." in text and key == ""


@pytest.mark.parametrize(
    ("source", "parsers"), [(DROPS_ALL, DETECTED), (PLAIN, Parsers("none")), (PLAIN, Parsers("openai"))]
)
def test_tools_that_cannot_be_told_are_refused(source: str, parsers: Parsers) -> None:
    with pytest.raises(ServiceError) as caught:
        rendered(source, ChatPrompt(ASK, tools=TOOLS), parsers)
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "chat.tools")


def test_a_required_call_is_json_where_no_form_is_known() -> None:
    prompt = ChatPrompt(ASK, tools=TOOLS, must_call=("f",))
    assert rendered(SHOWS, prompt)[1] == rendered(SHOWS, prompt, Parsers("pythonic"))[1] == "json"
    assert rendered(PLAIN, prompt)[1] == "hermes"


def test_the_option_wins_over_the_template() -> None:
    prompt = ChatPrompt(ASK, tools=TOOLS)
    assert rendered(SHOWS, prompt, Parsers("llama3_json"))[1] == "llama3_json"
    assert rendered(SHOWS, prompt, Parsers("mistral"))[1] == "mistral"
    assert rendered(SHOWS + "{# [ARGS] #}", prompt, Parsers("mistral"))[1] == "mistral_args"
    assert rendered(TEMPLATES["qwen"], prompt, Parsers("none"))[1] == ""
    with loaded(PLAIN, Parsers(reasoning="deepseek_r1")) as template:
        found = template.sections(ChatPrompt(ASK), template.render(ChatPrompt(ASK), 1 << 16))
        assert found.reasoning == "deepseek_r1" and found.is_reasoning
    with loaded(TEMPLATES["qwen"], Parsers(reasoning="none")) as template:
        assert template.sections(ChatPrompt(ASK), template.render(ChatPrompt(ASK), 1 << 16)).reasoning == ""


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("smollm3", "hermes"),
        ("phi_3_5", "hermes"),
        ("deepseek_r1_distill", "deepseek_v3"),
        ("deepseek_v3_1", "deepseek_v31"),
    ],
)
def test_published_templates_without_tools(name: str, key: str) -> None:
    text, found = rendered(PUBLISHED[name], ChatPrompt(ASK, tools=TOOLS))
    assert "You may call these functions" in text and found == key


def test_a_template_that_shows_tools_with_some_turns_is_left_alone() -> None:
    source = "{% if tools and messages | length == 1 %}{{ tools }}{% endif %}" + PLAIN
    text, _ = rendered(source, ChatPrompt((*ASK, ChatMessage("assistant", "so")), tools=TOOLS))
    assert text == "<user>hi\n<assistant>so\n"


def test_gemma_is_told_of_its_own_form() -> None:
    text, key = rendered(TEMPLATES["gemma"], ChatPrompt(ASK, tools=TOOLS))
    assert "answer with nothing but a JSON object" in text and key == "gemma3"


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_at_start(option: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check(EngineConfig(), ServiceConfig(**{option: "nobody"}))  # type: ignore[arg-type] # of other fields
    assert option.replace("_", "-") in caught.value.message
