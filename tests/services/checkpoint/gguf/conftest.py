"""A folder of its own for what is made of GGUF files, and one small file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.services.checkpoint import digests
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.gguf_files import write_gguf

SHAPE = Shape("llama", vocab=64, hidden=32, intermediate=32, layers=1, head_dim=8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the folders that are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digests.remembered.cache_clear()
    yield tmp_path / "cache" / "sluice" / "gguf"
    digests.remembered.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE)


@pytest.fixture
def file(checkpoint: Path, tmp_path: Path) -> Path:
    """The same as one GGUF file."""
    return write_gguf(checkpoint, tmp_path / "Tiny-Q8_0.gguf", "Q8_0")
