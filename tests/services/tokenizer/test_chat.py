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
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource, read_template
from sluice_server.services.tokenizer.loading import check_template
from tests.oracle.templates import TEMPLATES
from tests.oracle.tokenizers import byte_level_bpe

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MAX_BYTES = 1 << 20
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
}
TOOLS = (Tool("weather", "It's <b> é", json.dumps(SCHEMA)), Tool("clock", "", '{"type": "object", "properties": {}}'))
CALLS = (ToolCall("weather", '{"days": [1, 2], "city": "Zürich <&> \'q\'"}', "call00001"),)
CHATS = {
    "one turn": (ChatMessage("user", " <é> 'q' 😀\n"),),
    "system": (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "<think>\nhm\n</think>\n\nyes "),
        ChatMessage("user", "more"),
    ),
    "tools": (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "weather?"),
        ChatMessage("assistant", None, reasoning="I must look.\n", tool_calls=CALLS),
        ChatMessage("tool", '{"c": 3,\n"s": "ok"}', tool_call_id="call00001", name="weather"),
        ChatMessage("assistant", "3 degrees"),
    ),
    "two calls": (
        ChatMessage("user", "both"),
        ChatMessage("assistant", "Looking.", tool_calls=(*CALLS, ToolCall("clock", "{}", "call00002"))),
        ChatMessage("tool", "a", tool_call_id="call00001"),
        ChatMessage("tool", "b", tool_call_id="call00002"),
    ),
    "wrong order": (ChatMessage("assistant", "first"), ChatMessage("assistant", "again")),
    "reasoning": (ChatMessage("user", "why"), ChatMessage("assistant", "so", reasoning="because")),
}
SMALL = {
    "loop control": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages | tojson(indent=2, ensure_ascii=true) }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ cls_token }}{{ undefined_one }}{{ documents }}{{ tools is none }}",
    "trimmed blocks": "   {% if add_generation_prompt %}\nassistant\n   {% endif %}\nend",
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


def as_dicts(messages: tuple[ChatMessage, ...]) -> list[dict[str, Any]]:
    """Messages as users of transformers write them."""
    turns = []
    for one in messages:
        turn: dict[str, Any] = {"role": one.role, "content": one.content}
        if one.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in one.tool_calls
            ]
        turn |= {name: value for name in ("tool_call_id", "name") if (value := getattr(one, name))}
        turns.append(turn | ({"reasoning_content": one.reasoning} if one.reasoning is not None else {}))
    return turns


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
    prompt = ChatPrompt(CHATS[chat], prompted, tools, json.dumps(variables))
    functions = [
        {"name": one.name, "description": one.description, "parameters": json.loads(one.parameters)} for one in tools
    ]
    try:
        want = oracle.apply_chat_template(
            as_dicts(CHATS[chat]),
            tools=[{"type": "function", "function": function} for function in functions] or None,
            chat_template=template.source.default,
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
    assert template.render(prompt, MAX_BYTES) == want


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
    (tmp_path / "chat_template.jinja").write_text("own é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools é")
    assert read_template(tmp_path) == TemplateSource("own é", "tools é")


def test_the_detokenizer_needs_no_template_language() -> None:
    code = "import sys, sluice_server.services.detokenizer.process; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chats_with_tools_take_the_template_for_them() -> None:
    template = ChatTemplate(TemplateSource("plain", "with tools"))
    try:
        chat = CHATS["one turn"]
        assert template.render(ChatPrompt(chat), 100) == "plain"
        assert template.render(ChatPrompt(chat, tools=TOOLS), 100) == "with tools"
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
        check_template(tmp_path)
    assert caught.value.reason == "MODEL_INVALID"
