"""A checkpoint's tokenizer and template are both validated when they are loaded."""

from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.tokenizer.loading import load_encoder
from tests.oracle.tokenizers import byte_level_bpe


def test_a_template_that_is_none_is_refused_with_the_tokenizer(tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    load_encoder(tmp_path).close()
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ServiceError, match="the chat template cannot be read") as caught:
        load_encoder(tmp_path)
    assert caught.value.reason == "MODEL_INVALID"
