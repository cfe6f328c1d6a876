"""Published chat templates choose the form of tool calls, and the calls that they write are read back as they were."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice_server.services.messages.work import ChatMessage, Sections, ToolCall
from sluice_server.services.sections.reasoning import reasoning_format
from sluice_server.services.sections.splitters import splitter_of
from sluice_server.services.sections.tools import tool_format
from tests.oracle.chats import TOKENS, TOOLS, as_dicts, tools_as_dicts
from tests.oracle.templates import PUBLISHED

ORACLE: Any = render_jinja_template
FORMS = {
    "bielik_3": "hermes",
    "deepseek_r1_distill": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "glm_4_6": "glm45",
    "granite_4": "hermes",
    "kimi_k2": "kimi_k2",
    "mimo_vl": "hermes",
    "minimax_m2": "minimax_m2",
    "ministral_3": "mistral_args",
    "mistral_small_3_2": "mistral_args",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "qwq": "hermes",
    "seed_oss": "qwen3_coder",
    "step_3_5": "qwen3_coder",
}
CALLS = (
    ToolCall("weather", '{"city": "Zürich }\\"]", "days": [1, 2]}', "call00001"),
    ToolCall("clock", "{}", "call00002"),
)
ASK = ChatMessage("user", "both")
WRITTEN_OTHERWISE = {  # signs of forms whose templates are not published under a licence that allows a copy
    "To call tools, write <tool_calls>\n{...}\n</tool_calls>": "minimax",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME": "deepseek_v3",
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>": "glm45",
}


@pytest.mark.parametrize("name", list(FORMS))
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    source = PUBLISHED[name]
    known = tool_format(source)
    assert known is not None and known.key == FORMS[name]
    turns = as_dicts((ASK, ChatMessage("assistant", "", tool_calls=CALLS)))
    options = {"chat_template": source, "tools": tools_as_dicts(TOOLS), **TOKENS}
    (before,), _ = ORACLE([turns[:1]], add_generation_prompt=False, **options)
    (whole,), _ = ORACLE([turns], add_generation_prompt=False, **options)
    assert whole.startswith(before)
    output = whole[len(before) :]
    names = tuple(tool.name for tool in TOOLS)
    splitter = splitter_of(Sections("", tools=known.key, names=names, typed=(("weather", "days"),)), {})
    splits = [splitter.feed(one) for one in output] + [splitter.flush()]
    found = [(call.name, json.loads(call.arguments)) for split in splits for call in split.calls]
    assert found == [(call.name, json.loads(call.arguments)) for call in CALLS], output


@pytest.mark.parametrize(("source", "key"), list(WRITTEN_OTHERWISE.items()))
def test_a_sign_chooses_the_form(source: str, key: str) -> None:
    known = tool_format(source)
    assert known is not None and known.key == key


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseek_v3_1", "deepseek_v3_2", "glm_4_6", "minimax_m2"])
def test_reasoning_between_think_marks_is_found(name: str) -> None:
    known = reasoning_format(PUBLISHED[name])
    assert known is not None and known.key == "think"
    for choice in ("glm45", "kimi_k2", "minimax_m2", "deepseek_v3"):
        assert reasoning_format("", choice) is known
