"""Published chat templates, rendered as transformers does; where templates and special tokens are found."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers

from sluice_server.engine.errors import ServiceError
from sluice_server.services.messages.work import ChatPrompt, Tool
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource, read_template
from sluice_server.services.tokenizer.loading import checked_template
from tests.oracle.chats import CHATS, TOKENS, TOOLS, as_dicts, tools_as_dicts
from tests.oracle.templates import TEMPLATES, has_place_for_calls
from tests.oracle.tokenizers import byte_level_bpe

MAX_BYTES = 1 << 20
SMALL = {
    "loop control": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages | tojson(indent=2, ensure_ascii=true) }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ cls_token }}{{ undefined_one }}{{ documents }}{{ tools is none }}",
    "trimmed blocks": "   {% if add_generation_prompt %}\nassistant\n   {% endif %}\nend",
    "parts": "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content if part.type == 'text' %}"
    "{{ part.text }}{% endfor %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}",
    "parts of either kind": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{{ m.tool_calls }}{% endfor %}",
    "set in generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 # an untyped library
    directory = tmp_path_factory.mktemp("oracle")
    byte_level_bpe(directory)
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # shipped so
        tokenizer_file=str(directory / "tokenizer.json"), **TOKENS
    )


@pytest.fixture(scope="module", params=[*TEMPLATES, *SMALL])
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    made = ChatTemplate(TemplateSource((TEMPLATES | SMALL)[request.param], special_tokens=TOKENS))
    yield made
    made.close()


@pytest.mark.parametrize("chat", list(CHATS))
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_rendered_as_transformers_does(
    template: ChatTemplate,
    oracle: Any,  # noqa: ANN401 # an untyped library
    chat: str,
    prompted: bool,
    tools: tuple[Tool, ...],
) -> None:
    variables = {"enable_thinking": not prompted, "date_string": "26 Jul 2024"} if tools else {}
    source = template.source.default or ""
    if not shows_tools(oracle, source):
        tools = ()  # they are told in a turn of their own: see `test_placing`
    prompt = ChatPrompt(CHATS[chat], prompted, tools, json.dumps(variables))
    if any(one.tool_calls for one in CHATS[chat]) and not has_place_for_calls(source):
        with pytest.raises(ServiceError, match="has no place for tool calls"):
            template.render(prompt, MAX_BYTES)
        return
    turns = as_dicts(CHATS[chat])
    if source == SMALL["parts"]:
        turns = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in turns]
    try:
        want = oracle.apply_chat_template(
            turns,
            tools=tools_as_dicts(tools),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompted,
            **variables,
        )
    except (jinja2.TemplateError, TypeError) as error:
        with pytest.raises(ServiceError) as caught:
            template.render(prompt, MAX_BYTES)
        if type(error) is jinja2.TemplateError:  # raised by the template itself
            assert str(error) in caught.value.message
        return
    assert template.render(prompt, MAX_BYTES).text == want


def shows_tools(oracle: Any, source: str) -> bool:  # noqa: ANN401 # an untyped library
    """Whether a template writes something else with tools."""
    with_tools, without = (
        oracle.apply_chat_template(as_dicts(CHATS["one turn"]), tools=tools, chat_template=source, tokenize=False)
        for tools in (tools_as_dicts(TOOLS), None)
    )
    return bool(with_tools != without)


def test_most_of_these_are_rendered_and_some_refuse(oracle: Any) -> None:  # noqa: ANN401 # an untyped library
    refused = set()
    for name, source in TEMPLATES.items():
        for chat, messages in CHATS.items():
            try:
                oracle.apply_chat_template(as_dicts(messages), chat_template=source, tokenize=False)
            except (jinja2.TemplateError, TypeError):
                refused.add((name, chat))
    assert 5 <= len(refused) <= len(TEMPLATES) * len(CHATS) // 3


def test_the_template_file_wins_and_of_named_ones_the_default(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "yes"},
        {"name": "x", "template": ""},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == TemplateSource("yes", "no")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert read_template(tmp_path) == TemplateSource("yes", "no")
    (tmp_path / "chat_template.jinja").write_text("own é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools é")
    assert read_template(tmp_path) == TemplateSource("own é", "tools é")


def test_the_template_of_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert read_template(tmp_path) == TemplateSource("of a processor")


def test_the_detokenizer_needs_no_template_language() -> None:
    code = "import sys, sluice_server.services.detokenizer.process; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chats_with_tools_take_the_template_for_them() -> None:
    template = ChatTemplate(TemplateSource("plain", "with {{ tools is not none }}"))
    try:
        chat = CHATS["one turn"]
        assert template.render(ChatPrompt(chat), 100).text == "plain"
        assert template.render(ChatPrompt(chat, tools=TOOLS), 100).text == "with True"
    finally:
        template.close()


def test_special_tokens_come_from_the_config_then_from_their_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<map>"}, "eos_token": "<e>"})
    )
    assert read_template(tmp_path).special_tokens == {"bos_token": "<map>", "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<config>"}))
    assert read_template(tmp_path).special_tokens == {"bos_token": "<config>", "eos_token": "<e>"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{% for %}"),
        ("chat_template.jinja", "{{" + "(" * 100_000),
        ("chat_template.jinja", "x" * (1 << 20) + "x"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [3]}'),
        ("tokenizer_config.json", '{"a":' + "[" * 100_000),
        ("special_tokens_map.json", "3"),
    ],
)
def test_files_that_cannot_be_read_are_refused_at_start(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ServiceError, match=rf"{name}: |the chat template cannot be read") as caught:
        checked_template(tmp_path)
    assert caught.value.reason == "MODEL_INVALID"
