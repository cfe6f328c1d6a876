"""`sluice calibrate`: the ids of a text in a file that the engine takes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.calibration import with_calibration
from sluice_server.engine.models.config import read_config
from sluice_server.services.cli.main import app
from sluice_server.services.tokenizer.encoding import load_tokenizer
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe

TEXT = "The engine reads its weights, and rounds them by what it sees. " * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), Shape(vocab=404))
    byte_level_bpe(directory)
    return directory


def test_what_is_written_is_what_the_engine_takes(checkpoint: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text(TEXT)
    result = CliRunner().invoke(app, ["calibrate", str(checkpoint), str(text), str(file), "--tokens", "100"])
    assert result.exit_code == 0 and "100 ids; sluice serve --quantization int4 --calibration" in result.output
    ids = with_calibration(read_config(checkpoint), str(file), "int4").calibration
    assert list(ids) == load_tokenizer(checkpoint / "tokenizer.json").encode(TEXT).ids[:100]
    assert json.loads(file.read_text())["vocab_size"] == 404


@pytest.mark.parametrize(
    ("text", "file", "message"),
    [
        ("none.txt", "ids.json", "^TEXT: cannot read .*none.txt: No such file"),
        ("short.txt", "ids.json", "^TEXT: .* has 1 tokens; at least 16 are needed"),
        ("text.txt", "none/ids.json", "^FILE: cannot write .*none/ids.json: No such file"),
    ],
)
def test_what_cannot_be_read_or_written_is_named(
    text: str, file: str, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text("a")
    result = CliRunner().invoke(app, ["calibrate", str(checkpoint), str(tmp_path / text), str(tmp_path / file)])
    assert isinstance(result.exception, ServiceError)
    with pytest.raises(ServiceError, match=message):
        raise result.exception
