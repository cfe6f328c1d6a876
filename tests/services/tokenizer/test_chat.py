"""Templates of the wild, rendered as transformers does; where templates and special tokens are found."""

import json
from pathlib import Path

import pytest
import transformers

from engine.errors import ServiceError
from services.tokenizer.chat import ChatTemplate
from services.work import ChatMessage
from tests.oracle.tokenizers import byte_level_bpe

MESSAGES = (ChatMessage("user", "<é> 'q' 😀"), ChatMessage("assistant", "yes"))
TEMPLATES = {
    "generation": "{%- for m in messages %}\n  {%- generation %}\n    {{- m.content }}\n"
    "  {%- endgeneration %}\n|{% endfor %}",
    "loop control": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages | tojson(indent=2, ensure_ascii=true) }}",
    "namespace": "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s + m.role %}"
    "{% endfor %}{{ n.s }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ cls_token }}{{ undefined_one }}",
    "trimmed blocks": "   {% if add_generation_prompt %}\nassistant\n   {% endif %}\nend",
}


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("prompted", [True, False])
def test_rendered_as_transformers_does(name: str, prompted: bool, tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    oracle = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # shipped so
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    oracle.chat_template = TEMPLATES[name]
    turns = [{"role": m.role, "content": m.content} for m in MESSAGES]
    want = oracle.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompted)
    assert ChatTemplate.load(tmp_path).render(MESSAGES, prompted) == want


def test_the_template_file_wins_and_of_named_ones_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, True) == "yes"
    (tmp_path / "chat_template.jinja").write_text("own é")
    assert ChatTemplate.load(tmp_path).render(MESSAGES, True) == "own é"


def test_special_tokens_come_from_the_config_then_from_their_map(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }} {{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<map>"}, "eos_token": "<e>"})
    )
    assert ChatTemplate.load(tmp_path).render(MESSAGES, True) == "<map> <e>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<config>"}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, True) == "<config> <e>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{% for %}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("special_tokens_map.json", "3"),
    ],
)
def test_files_that_cannot_be_read_are_refused_at_start(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ServiceError, match="the chat template cannot be read") as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.reason == "MODEL_INVALID"
