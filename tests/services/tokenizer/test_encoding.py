"""Prompts to ids: every form, every refusal; chat templates as Hugging Face renders them."""

import json
from pathlib import Path

import pytest
import transformers

from engine.errors import Code, ServiceError
from engine.request import Limits
from services.tokenizer.encoding import TextEncoder
from services.work import (
    ChatMessage,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    pack_ids,
)
from tests.oracle.tokenizers import FAMILIES, byte_level_bpe

LIMITS = Limits(context_length=100, vocab_size=404, max_prompt_bytes=64)
TEMPLATES = {
    "chatml": """{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """{{ bos_token }}
{%- for m in messages %}
    <|h|>{{ m['role'] }}<|e|>\n\n{{ m['content'] | trim }}<|eot|>
{% endfor %}
{% if add_generation_prompt %}
  <|h|>assistant<|e|>
{% endif %}""",
    "mistral": """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] + eos_token }}{% endif %}
{% endfor %}""",
}
MESSAGES = (ChatMessage("user", " hi <b> "), ChatMessage("assistant", "yes"), ChatMessage("user", "é 😀"))


def with_template(directory: Path, template: str) -> TextEncoder:
    byte_level_bpe(directory)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextEncoder.load(directory)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_chat_is_rendered_as_transformers_does(name: str, tmp_path: Path) -> None:
    encoder = with_template(tmp_path, TEMPLATES[name])
    oracle = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # untyped library
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    oracle.chat_template = TEMPLATES[name]
    want = oracle.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in MESSAGES], tokenize=False, add_generation_prompt=True
    )
    ids = encoder.encode(ChatPrompt(MESSAGES), Limits(1000, 404))
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == want


@pytest.mark.parametrize("family", list(FAMILIES))
def test_pieces_are_the_bytes_of_the_text(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    encoder = TextEncoder.load(tmp_path)
    text = "hello world over the lazy dog"
    ids = encoder.encode(TextPrompt(text), LIMITS)
    assert b"".join(encoder.pieces(ids)).decode().strip() == text
    assert encoder.pieces([100_000]) == (b"",)


def refused(encoder: TextEncoder, prompt: TextPrompt | TokenPrompt | ChatPrompt) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        encoder.encode(prompt, LIMITS)
    return caught.value


def test_bad_prompts_are_refused_by_field_value_and_limit(tmp_path: Path) -> None:
    encoder = with_template(tmp_path, TEMPLATES["mistral"])
    assert "65 bytes; at most 64" in refused(encoder, TextPrompt("a" * 65)).message
    assert refused(encoder, TextPrompt("a\ud800b")).field == "prompt.text"
    assert "[1]: 404 is not in [0, 404)" in refused(encoder, TokenPrompt(pack_ids([3, 404]))).message
    assert refused(encoder, TokenPrompt(b"123")).code is Code.INVALID_ARGUMENT
    turns = (ChatMessage("assistant", "x"),)
    assert "roles must alternate" in refused(encoder, ChatPrompt(turns)).message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template: str, tmp_path: Path) -> None:
    error = refused(with_template(tmp_path, template), ChatPrompt(MESSAGES))
    assert error.message == "prompt.chat: the model's chat template cannot render these messages"


def test_missing_or_corrupt_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"tokenizer\.json: is missing"):
        TextEncoder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ServiceError, match=r"tokenizer\.json: is not a tokenizer"):
        TextEncoder.load(tmp_path)
    byte_level_bpe(tmp_path)
    encoder = TextEncoder.load(tmp_path)
    assert refused(encoder, ChatPrompt(MESSAGES)).reason == "NO_CHAT_TEMPLATE"
