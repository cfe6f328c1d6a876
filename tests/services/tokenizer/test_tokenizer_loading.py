"""A checkpoint's tokenizer and template are both validated when they are loaded."""

import contextlib
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.messages.work import ChatMessage, ChatPrompt
from sluice_server.services.tokenizer.chat import TemplateSource
from sluice_server.services.tokenizer.loading import checked_template, load_encoder
from tests.oracle.tokenizers import byte_level_bpe


def test_a_template_that_is_none_is_refused_with_the_tokenizer(tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    load_encoder(tmp_path).close()
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ServiceError, match=r"the chat template cannot be read: line 1: Expected an expr") as caught:
        load_encoder(tmp_path)
    assert caught.value.reason == "MODEL_INVALID"


def test_the_template_of_the_option_takes_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("its own")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("its own for tools")
    (tmp_path / "other.jinja").write_text("{{ bos_token }} é")
    own = TemplateSource("its own", "its own for tools", {"bos_token": "<s>", "eos_token": "</s>"})
    assert checked_template(tmp_path) == own
    for given, read in ((str(tmp_path / "other.jinja"), "{{ bos_token }} é"), ("{{ 'text' }}", "{{ 'text' }}")):
        assert checked_template(tmp_path, given) == TemplateSource(read, None, own.special_tokens)
    with contextlib.closing(load_encoder(tmp_path, chat_template="{{ bos_token }}x")) as encoder:
        assert encoder.render(ChatPrompt((ChatMessage("user", "hi"),)), Limits(100, 404)).text == "<s>x"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no/such.jinja", "no/such.jinja does not exist, and is no template: it has no braces"),
        (".", ". is no file, or has more than 1048576 bytes"),
        ("a\n{% for x in %}", "line 2: Expected an expression, got 'end of statement block'"),
        ("{{ 1 | upper(", "line 1: unexpected"),
    ],
)
def test_what_is_no_template_is_refused_by_the_options_name(given: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as caught:
        checked_template(tmp_path, given)
    assert caught.value.reason == "INVALID_SETTING" and caught.value.message.startswith(f"--chat-template: {said}")


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff{{")
    with pytest.raises(ServiceError, match="cannot be read as UTF-8"):
        checked_template(tmp_path, str(tmp_path / "t"))
