"""GGUF files in a repository of the hub."""

from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.checkpoint import model_source
from sluice_server.services.checkpoint.model_source import resolve_model


class Hub:
    """A hub with a repository's files, as `snapshot_download` sees it."""

    def __init__(self, directory: Path, files: dict[str, Path]) -> None:
        self.asked: list[list[str]] = []
        self._directory = directory
        self._files = files

    def download(self, repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append(allow_patterns)
        for name in (one for one in self._files if any(fnmatch(one, pattern) for pattern in allow_patterns)):
            (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
            if not (self._directory / name).exists():
                (self._directory / name).symlink_to(self._files[name])
        self._directory.mkdir(exist_ok=True)
        return str(self._directory)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("org/tiny:Q8_0", "Tiny-Q8_0.gguf"),
        ("org/tiny:q8_0", "Tiny-Q8_0.gguf"),
        ("org/tiny:Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        ("org/tiny", "Tiny-Q4_K_M.gguf"),
        ("org/tiny:F16", "Tiny-F16.gguf"),
        ("org/tiny:BF16", "BF16/Tiny-BF16-00001-of-00001.gguf"),
        ("org/tiny:Q5_K_M", ""),
    ],
)
def test_a_repository_is_asked_for_one_file(
    model: str, chosen: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-F16.gguf", "BF16/Tiny-BF16-00001-of-00001.gguf")
    hub = Hub(tmp_path / "snapshot", dict.fromkeys((*names, "mmproj-Tiny-F16.gguf", "README.md"), file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    if not chosen:
        with pytest.raises(ServiceError, match=r"--model org/tiny:Q5_K_M: 0 GGUF files fit; name one of: none"):
            resolve_model(model, "")
        return
    source = resolve_model(model, "")
    assert source.path == tmp_path / "snapshot" / chosen and source.name == model
    assert (source.directory / "config.json").is_file()
    found = [path for path in (tmp_path / "snapshot").rglob("*.gguf") if not path.name.startswith("mmproj")]
    assert len(found) == 1, "one file is downloaded"


def test_a_repository_of_other_files_says_how_to_name_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "snapshot", {"Tiny-Q6_K.gguf": file})
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    with pytest.raises(ServiceError, match=r"0 GGUF files fit.*may have another, as in org/tiny:Q8_0"):
        resolve_model("org/tiny", "")
    assert model_source.HUB_FILES in hub.asked
