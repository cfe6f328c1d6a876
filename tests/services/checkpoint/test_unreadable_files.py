"""Files of a model that this process may not read: the error is one line with the file and why, not "corrupt"."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.engine.models.headers import read_tensors
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.services.checkpoint.digests import Remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.permissions import modes_count

WEIGHTS = "model.safetensors"
SAID = r"cannot be read by this process \(user id \d+\): Permission denied$"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, Shape("llama"))
    (path / "model.gguf").write_bytes(b"GGUF")
    return path


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "configuration": ("config.json", read_config),
    "headers": (WEIGHTS, read_tensors),
    "weights": (WEIGHTS, lambda path: Checkpoint(path, torch.float32, torch.device("cpu"))),
    "GGUF": ("model.gguf", lambda path: read_header(path / "model.gguf")),
    "tokenizer": ("config.json", lambda path: CheckpointFiles(resolve_model(str(path), ""), Remembered(None))),
    "folder": (".", read_config),
    "folder above": (".", lambda path: resolve_model(str(path / "model"), "")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_may_not_be_read_is_named_with_the_reason(name: str, model: Path) -> None:
    file, read = READERS[name]
    mode = (model / file).stat().st_mode
    (model / file).chmod(0)
    try:
        with modes_count(), pytest.raises(ServiceError, match=SAID) as error:
            read(model)
    finally:
        (model / file).chmod(mode)
    assert error.value.reason == "MODEL_INVALID" and error.value.message.startswith(str(model))
