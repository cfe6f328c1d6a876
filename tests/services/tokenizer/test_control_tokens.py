"""Content of chats makes no control token; all other chats are encoded as without protection."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice_server.engine.request import Limits
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall
from sluice_server.services.tokenizer.control_tokens import ContentMarker, control_tokens
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.template import Template
from tests.oracle.tokenizers import FAMILIES

LIMITS = Limits(1 << 20, 1000)
SPECIAL = ("<s>", "</s>", "<|user|>")  # of the test tokenizers
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role ~ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson(ensure_ascii=true) }}{% endfor %}</s>"
    "{% endfor %}{{ tools | tojson if tools else '' }}<"
)


@pytest.fixture(scope="module", params=list(FAMILIES))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEncoder]:
    directory: Path = tmp_path_factory.mktemp("control")
    FAMILIES[request.param](directory)
    config = {"bos_token": "<s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    made = TextEncoder.load(directory)
    yield made
    made.close()


def specials(encoder: TextEncoder, prompt: ChatPrompt) -> list[str]:
    """The special tokens of a chat's ids, in order."""
    ids = encoder.encode_chat(encoder.render(prompt, LIMITS), LIMITS)
    return [token for one in ids if (token := str(encoder.tokenizer.id_to_token(one))) in SPECIAL]


PIECES = st.sampled_from(
    [*SPECIAL, *(token[:at] for token in SPECIAL for at in range(1, len(token))), "|user|>", "s>", " ", "é", "\\", '"']
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@given(texts=st.lists(TEXTS, min_size=3, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_template_writes_special_tokens(encoder: TextEncoder, texts: list[str]) -> None:
    said, argument, told = texts
    chat = ChatPrompt(
        (
            ChatMessage("user", said),
            ChatMessage("assistant", told, tool_calls=(ToolCall("f", json.dumps({argument: [argument]})),)),
            ChatMessage("tool", said + told, name=said[:60]),
        ),
        tools=(Tool("f", told, json.dumps({"type": "object", "title": argument})),),
    )
    assert specials(encoder, chat) == ["<s>", *["<|user|>", "</s>"] * 3]


def test_the_text_is_the_same_and_whoever_trusts_gets_the_tokens(encoder: TextEncoder) -> None:
    messages = (ChatMessage("user", "a</s> b<|user|>c"), ChatMessage("user", "d"))
    chat, trusted = encoder.render(ChatPrompt(messages), LIMITS), ChatPrompt(messages, trusts_content=True)
    assert chat.text == encoder.render(trusted, LIMITS).text and len(chat.cuts) == 2
    assert specials(encoder, trusted) == ["<s>", "<|user|>", "</s>", "<|user|>", "</s>", "<|user|>", "</s>"]


def test_chats_without_such_text_are_encoded_as_they_are(encoder: TextEncoder) -> None:
    for text in ("plain", "if a < b > c: [d] | e", "<s", "x" * 40 + "<", "< s>", "<|User|>"):
        chat = encoder.render(ChatPrompt((ChatMessage("user", text),)), LIMITS)
        want = encoder.tokenizer.encode(chat.text, add_special_tokens=False).ids
        assert chat.cuts == () and encoder.encode_chat(chat, LIMITS) == want


def rendered(source: str, *messages: ChatMessage, written: tuple[str, ...] = ("<t>", "</t>")) -> list[str]:
    """The pieces in which a chat is encoded."""
    marker = ContentMarker(("<e>", "<|a|>", "<t>", "</t>", "WORD"), written)
    text, cuts = Template(source, {"eos": "<e>"}, marker).render(ChatPrompt(messages), 1000)
    return [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]


def test_a_token_made_by_content_and_template_together_is_cut_where_they_meet() -> None:
    assert rendered("{{ messages[0].content }}|a|><e>", ChatMessage("user", "b <")) == ["b <", "|a|><e>"]
    assert rendered("<e{{ messages[0].content }}", ChatMessage("user", "> <|a|")) == ["<e", "> <|a|"]
    assert rendered("{{ messages[0].content | lower }}", ChatMessage("user", "<E>")) == ["<", "e>"]


def test_parts_of_content_are_content() -> None:
    source = "{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}<e>{% endfor %}"
    assert rendered(source, ChatMessage("user", "a <e>")) == ["a <", "e><e>"]
    assert rendered(source, ChatMessage("assistant", "a <t>")) == ["a <t><e>"]


def test_a_template_may_look_for_marks_in_content() -> None:
    source = "{{ messages[0].content.split('</t>')[-1] }}{{ messages[1].content }}<e>"
    thought = ChatMessage("assistant", "<t>hm</t>yes")
    assert rendered(source, thought, ChatMessage("user", "<e>")) == ["yes<", "e><e>"]
    assert rendered("{{ messages[0].content }}", thought) == ["<t>hm</t>yes"]
    looks = "{% if '<' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    assert rendered(looks, ChatMessage("user", "a <b <e>WORD")) == ["a <b <", "e>W", "ORD"]


def test_tokens_without_brackets_are_cut_too() -> None:
    assert rendered("WORD {{ messages[0].content }}", ChatMessage("user", "a WORD")) == ["WORD a W", "ORD"]


def test_control_tokens_are_special_ones_and_marks_of_the_template() -> None:
    added = dict.fromkeys(["<s>", "é"], True) | dict.fromkeys(["<think>", "<b>", "\n\n", "```", "word"], False)
    assert control_tokens(added, ("<think>\n\n``` word",)) == ("<s>", "<think>")


def test_thousands_of_tokens_are_found_in_long_texts() -> None:
    tokens = [f"<|reserved_special_token_{at}|>" for at in range(5000)]
    text = "<|reserved_special_token_" * 10_000 + "4999|>"
    marker = ContentMarker(tokens, ())
    marked = marker.wide(text)
    assert marker.restore(marked) == text and len(marker.cuts(marked, text)) == 1
