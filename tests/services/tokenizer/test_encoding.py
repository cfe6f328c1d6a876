"""Prompts to ids: every form and every refusal; chat templates as Hugging Face renders them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Sections, TextPrompt, TokenPrompt, pack_ids
from sluice_server.services.tokenizer.encoding import RenderedChat, TextEncoder
from tests.oracle.tokenizers import FAMILIES, byte_level_bpe

LIMITS = Limits(context_length=100, vocab_size=404, max_prompt_bytes=64)
ALTERNATING = """{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{ m['content'] }}
{% endfor %}"""
MESSAGES = (ChatMessage("user", " hi <b> "), ChatMessage("assistant", "yes"), ChatMessage("user", "é 😀"))


@pytest.fixture
def with_template(tmp_path: Path) -> Iterator[Callable[[str], TextEncoder]]:
    """An encoder with a template; its rendering children end with the test."""
    made: list[TextEncoder] = []

    def make(template: str) -> TextEncoder:
        byte_level_bpe(tmp_path)
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        made.append(TextEncoder.load(tmp_path))
        return made[-1]

    yield make
    for encoder in made:
        encoder.close()


def test_a_template_writes_the_special_tokens_itself(with_template: Callable[[str], TextEncoder]) -> None:
    encoder = with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    limits = Limits(1000, 404)
    ids = encoder.encode_chat(encoder.render(ChatPrompt(MESSAGES), limits), limits)
    bos, eos = (encoder.tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    assert ids[0] == bos and [one in (bos, eos) for one in ids].count(True) == 4
    text = "<s> hi <b> </s>yes</s>é 😀</s>"
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("family", list(FAMILIES))
def test_pieces_are_the_bytes_of_the_text(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    encoder = TextEncoder.load(tmp_path)
    text = "hello world over the lazy dog"
    ids = encoder.encode(TextPrompt(text), LIMITS)
    assert b"".join(encoder.pieces(ids)).decode().strip() == text
    assert encoder.pieces([100_000]) == (b"",)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ids_are_those_of_the_library_with_places(family: str, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family](tmp_path)
    encoder = TextEncoder.load(tmp_path)
    limits = Limits(1 << 20, 1000)
    for text in ("", "hello world", "<s> a <|user|>addedword b</s>", "é 😀\n\n 你好 " * 500, "x" * 3000):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert encoder.encode(TextPrompt(text, special), limits) == expected


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_places_are_those_of_the_library(family: str, special: bool, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family](tmp_path)
    encoder = TextEncoder.load(tmp_path)
    limits = Limits(1 << 20, 1000)
    for text in ("", "hello world", "<s> a <|user|>addedword b</s>", "é 😀\n\n 你好 "):
        expected = tokenizer.encode(text, add_special_tokens=special)
        ids, starts, ends = encoder.place(TextPrompt(text, special), limits)
        assert (ids, list(zip(starts, ends, strict=True))) == (expected.ids, expected.offsets)


def test_places_behind_cuts_are_those_in_the_whole_text(tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    encoder = TextEncoder.load(tmp_path)
    limits, text = Limits(1 << 20, 1000), "é hi <s>  x </s>😀 a"
    chat = RenderedChat(text, Sections(), cuts=(6, 13), add_special_tokens=True)
    ids, starts, ends = encoder.place(chat, limits)
    assert ids == encoder.encode_chat(chat, limits)
    pieces = encoder.pieces(ids)
    for piece, start, end in zip(pieces, starts, ends, strict=True):
        assert piece.strip() in text[start:end].encode() or start == end == 0
    assert max(ends) == len(text) and {6, 13} <= {0, *starts, *ends}
    with pytest.raises(ServiceError, match=r"prompt\.chat"):
        encoder.place(chat, Limits(1 << 20, 1000, max_prompt_bytes=3))


def refused(encoder: TextEncoder, prompt: TextPrompt | TokenPrompt | ChatPrompt) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        if isinstance(prompt, ChatPrompt):
            encoder.render(prompt, LIMITS)
        else:
            encoder.encode(prompt, LIMITS)
    return caught.value


def test_bad_prompts_are_refused_by_field_value_and_limit(with_template: Callable[[str], TextEncoder]) -> None:
    encoder = with_template(ALTERNATING)
    assert "65 bytes; at most 64" in refused(encoder, TextPrompt("a" * 65)).message
    assert refused(encoder, TextPrompt("a\ud800b")).field == "prompt.text"
    assert "[1]: 404 is not in [0, 404)" in refused(encoder, TokenPrompt(pack_ids([3, 404]))).message
    assert refused(encoder, TokenPrompt(b"123")).code is Code.INVALID_ARGUMENT
    turns = (ChatMessage("assistant", "x"),)
    assert "roles must alternate" in refused(encoder, ChatPrompt(turns)).message


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "line 1: access to attribute '__class__' of 'str' object is",
        ),
        ("\n{{ messages.append(1) }}", "line 2: access to attribute 'append' of 'list' object is unsafe."),
        ("{{ missing.attribute.x }}", "line 1: 'missing' is undefined"),
        ("a\n\n{{ 1 / 0 }}", "line 3: division by zero"),
        ("{% macro m(x) %}\n{{ x + 1 }}{% endmacro %}\n{{ m('a') }}", "line 2: can only concatenate str (not"),
        ("{{ [messages] + range }}", 'line 1: can only concatenate list (not "function") to list'),
        ("{{ ('<' ~ lipsum) | int + [] }}", "line 1: unsupported operand type(s) for +: 'int' and 'list'"),
        ("{{ {}[lipsum ~ 'x'] }}{{ raise_exception.x.y }}", "line 1: 'function object' has no attribute 'x'"),
    ],
)
def test_templates_cannot_leave_the_sandbox(
    template: str, why: str, with_template: Callable[[str], TextEncoder]
) -> None:
    error = refused(with_template(template), ChatPrompt(MESSAGES))
    assert error.message.startswith(f"prompt.chat: the model's chat template cannot render these messages: {why}")
    assert error.code is Code.INVALID_ARGUMENT and "0x" not in error.message and len(error.message) < 300


def test_missing_or_corrupt_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"tokenizer\.json: is missing"):
        TextEncoder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ServiceError, match=r"tokenizer\.json: is not a tokenizer"):
        TextEncoder.load(tmp_path)
    byte_level_bpe(tmp_path)
    encoder = TextEncoder.load(tmp_path)
    assert refused(encoder, ChatPrompt(MESSAGES)).reason == "NO_CHAT_TEMPLATE"


def test_words_are_written_with_a_space_before_them_and_without(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe(tmp_path)
    encoder = TextEncoder.load(tmp_path)
    found = encoder.encode_words(["fox", " fox", "straße"], Limits(100, 404))
    assert [tokenizer.decode(list(ids)) for ids in found] == ["fox", " fox", "straße", " straße"]
    with pytest.raises(ServiceError) as caught:
        encoder.encode_words(["fox"], Limits(100, 40))
    assert caught.value.field.startswith("bad_words")
