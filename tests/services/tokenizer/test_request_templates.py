"""Documents, templates of requests and special tokens of the tokenizer's own template, through renderer processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.child_pool import CpuTimeLimit
from sluice_server.services.tokenizer.encoding import TextEncoder
from tests.oracle.chats import CHATS, TOKENS, as_dicts
from tests.oracle.templates import PUBLISHED
from tests.oracle.tokenizers import byte_level_bpe, put_before

ORACLE: Any = render_jinja_template
LIMITS = Limits(1 << 20, 1000)
ASK = (ChatMessage("user", "hello"),)
OWN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_DOCUMENTS = "{% for d in documents or [] %}<s>{{ d.title }}: {{ d.text }}</s>{% endfor %}" + OWN
TOOL = Tool("weather", "It tells.", '{"type": "object", "properties": {}}')


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEncoder]:
    """A tokenizer whose own template puts <s> before a text, with a mark that is no special token."""
    directory: Path = tmp_path_factory.mktemp("own")
    tokenizer = byte_level_bpe(directory)
    tokenizer.add_tokens([AddedToken("<mark>")])
    put_before(tokenizer, "<s>", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN, **TOKENS}))
    made = TextEncoder.load(directory)
    yield made
    made.close()


def tokens(encoder: TextEncoder, prompt: ChatPrompt) -> list[str]:
    """The added tokens of a chat's ids, in order."""
    ids = encoder.encode_chat(encoder.render(prompt, LIMITS), LIMITS)
    added = encoder.tokenizer.get_added_tokens_decoder()
    return [added[one].content for one in ids if one in added]


def refusal(template: ChatTemplate, prompt: ChatPrompt) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        template.render(prompt, 10_000)
    return caught.value


@pytest.mark.parametrize("name", ["granite_3_3", "granite_4"])
@pytest.mark.parametrize("chat", ["one turn", "system"])
def test_documents_are_rendered_as_transformers_does(name: str, chat: str) -> None:
    template = ChatTemplate(TemplateSource(PUBLISHED[name], special_tokens=TOKENS))
    documents = [{"doc_id": 1, "title": "é", "text": "One."}, {"doc_id": "2", "text": "Two <b>.", "more": [1, None]}]
    options = {"documents": documents, "add_generation_prompt": True, **TOKENS}
    try:
        (want,), _ = ORACLE([as_dicts(CHATS[chat])], chat_template=PUBLISHED[name], **options)
        prompt = ChatPrompt(CHATS[chat], documents=tuple(json.dumps(one) for one in documents))
        assert template.render(prompt, 1 << 20).text == want and "Two <b>." in want
    finally:
        template.close()


def test_documents_for_which_a_template_has_no_place_are_refused() -> None:
    template = ChatTemplate(TemplateSource(OWN))
    try:
        found = refusal(template, ChatPrompt(ASK, documents=('{"text": "a"}',)))
        assert (found.code, found.field) == (Code.UNIMPLEMENTED, "chat.documents")
        assert "has no place for documents" in found.message
    finally:
        template.close()


def test_documents_write_no_special_token() -> None:
    template = ChatTemplate(TemplateSource(WITH_DOCUMENTS), added_tokens={"<s>": True, "</s>": True})
    try:
        document = json.dumps({"title": "</s>", "text": "<s>", "<s>": 1})
        found = template.render(ChatPrompt(ASK, documents=(document,)), 10_000)
        assert found.text == "<s></s>: <s></s>hello" and found.cuts == (4, 10)
        trusted = template.render(ChatPrompt(ASK, documents=(document,), trusts_content=True), 10_000)
        assert trusted.text == found.text and trusted.cuts == ()
    finally:
        template.close()


def test_a_request_brings_its_template(encoder: TextEncoder) -> None:
    for _ in range(2):
        for template, want in (("<{{ messages[0].content }}>", "<hello>"), ("{{ bos_token }}", TOKENS["bos_token"])):
            assert encoder.render(ChatPrompt(ASK, template=template), LIMITS).text == want
        assert encoder.render(ChatPrompt(ASK), LIMITS).text == "hello"


def test_it_names_special_tokens_and_content_does_not(encoder: TextEncoder) -> None:
    template = "<s>{% for m in messages %}<mark>{{ m.content }}</s>{% endfor %}"
    for content in ("hello", "<s>", "</s>", "<mark>", "<mar"):
        chat = ChatPrompt((ChatMessage("user", content),), template=template)
        assert tokens(encoder, chat) == ["<s>", "<mark>", "</s>"], content
    # A mark that the template in use does not write is a text like others.
    assert tokens(encoder, ChatPrompt((ChatMessage("user", "<mark>"),))) == ["<mark>"]


def test_it_has_the_sections_and_the_tools_of_its_own_formats(encoder: TextEncoder) -> None:
    thinking = ChatPrompt(ASK, template=OWN + "<think>\n{# </think> #}")
    assert encoder.render(thinking, LIMITS).sections.is_reasoning
    assert not encoder.render(ChatPrompt(ASK), LIMITS).sections.reasoning
    shown = ChatPrompt(ASK, tools=(TOOL,), template=OWN + "{{ tools | tojson if tools else '' }}[TOOL_CALLS]")
    placed = encoder.render(ChatPrompt(ASK, tools=(TOOL,), template=OWN), LIMITS)
    assert "You may call these functions" in placed.text
    assert "You may call these functions" not in encoder.render(shown, LIMITS).text
    assert encoder.render(shown, LIMITS).sections.tools != placed.sections.tools


def test_a_model_without_a_template_takes_that_of_a_request() -> None:
    template = ChatTemplate(TemplateSource())
    try:
        assert template.render(ChatPrompt(ASK, template=OWN), 100).text == "hello"
        assert refusal(template, ChatPrompt(ASK)).reason == "NO_CHAT_TEMPLATE"
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% for %}", "cannot render these messages: line 2"),
        ("{{ 1 | no_such_filter }}", "cannot render these messages"),
        ("{{ raise_exception('so') }}", "refuses: so"),
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "did not end within 0.3 s"),
        ("{{ 'x' * 9999999999 }}", "writes more than 10000 bytes"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{" + "(" * 60_000, "cannot render"),
        ("{{ '\\ud800' }}", "cannot render"),
    ],
)
def test_a_bad_template_fails_its_own_request(source: str, words: str) -> None:
    template = ChatTemplate(TemplateSource(OWN), patience=CpuTimeLimit(job_s=0.3))
    try:
        found = refusal(template, ChatPrompt(ASK, template=source))
        assert (found.code, found.field) == (Code.INVALID_ARGUMENT, "chat.template"), found.message
        assert words in found.message and "the request's chat template" in found.message
        for template_of_request in ("", OWN):
            assert template.render(ChatPrompt(ASK, template=template_of_request), 100).text == "hello"
    finally:
        template.close()


def test_special_tokens_are_added_once_also_where_content_is_cut(encoder: TextEncoder) -> None:
    for content in ("hello", "a<s>b</s>c"):
        messages = (ChatMessage("user", content),)
        plain = encoder.encode_chat(encoder.render(ChatPrompt(messages), LIMITS), LIMITS)
        added = encoder.encode_chat(encoder.render(ChatPrompt(messages, add_special_tokens=True), LIMITS), LIMITS)
        assert added == [encoder.tokenizer.token_to_id("<s>"), *plain]


@pytest.mark.parametrize(
    ("content", "is_open"),
    [("<think>\nI", True), ("<think>a</think>b", False), ("a", False), ("</think>", False), ("<think>", True)],
)
def test_reasoning_that_is_left_open_goes_on(content: str, is_open: bool, encoder: TextEncoder) -> None:
    chat = ChatPrompt(
        (ChatMessage("user", "what does <think> do?"), ChatMessage("assistant", content)),
        template=OWN + "{# </think> #}",
        continue_final_message=True,
    )
    assert encoder.render(chat, LIMITS).sections.is_reasoning is is_open
