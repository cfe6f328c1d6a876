"""The name of a checkpoint depends on its content, not on its path or the files beside it."""

import os
import shutil
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.checkpoint.digests import Remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource, commit_of, resolve_model

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "generation_config.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "chat_template.jinja": b"chat",
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
}
COMMIT = "c" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "model")


def written(path: Path) -> Path:
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def contents(path: Path, label: str = "") -> CheckpointFiles:
    return CheckpointFiles(ModelSource(path, "m", label), Remembered(None), with_weights=True)


def revision(path: Path, label: str = "") -> str:
    return contents(path, label).named().revision


@pytest.mark.parametrize("name", list(FILES))
def test_a_byte_of_any_file_is_another_revision(model: Path, name: str) -> None:
    before = contents(model)
    named = before.named()
    (model / name).write_bytes(FILES[name][:-1] + b"!")
    after = contents(model)
    assert before.is_changed() and not after.is_changed()
    assert (after.configuration == before.configuration) == name.endswith("safetensors")
    assert after.named().revision != named.revision and after.named().digest != named.digest


def test_two_files_that_change_places_are_another_revision(model: Path) -> None:
    before = revision(model)
    (model / "model-1.safetensors").write_bytes(b"two")
    (model / "model-2.safetensors").write_bytes(b"one")
    assert revision(model) != before


def test_a_copy_is_the_same_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    before = revision(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    for name in ("README.md", ".model-1.safetensors", "optimizer.pt"):  # nothing that is read
        (copy / name).write_text("beside")
    model.rename(tmp_path / "renamed")
    assert revision(copy) == revision(tmp_path / "renamed") == before


def test_a_link_that_is_turned_is_a_change(model: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other")
    (other / "model-1.safetensors").write_bytes(b"new")
    (tmp_path / "current").symlink_to(model)
    source = resolve_model(str(tmp_path / "current"), "")
    before = CheckpointFiles(source, Remembered(None), with_weights=True)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(other)
    assert before.is_changed() and before.directory == model and before.named().revision == revision(model)
    with pytest.raises(ServiceError, match="changed while it was being read"):
        before.check()
    assert CheckpointFiles(source, Remembered(None), with_weights=True).named().revision == revision(other)


def test_a_label_never_makes_two_contents_one(model: Path) -> None:
    before = revision(model, "prod-3")
    assert before == f"prod-3+{revision(model)}"
    (model / "model-1.safetensors").write_bytes(b"new")
    assert revision(model, "prod-3") != before and revision(model, "prod-3").startswith("prod-3+")


@pytest.mark.parametrize("label", ["a b", "a\n", "ä" * 65, "x" * 65, "a/b", "a@b"])
def test_a_label_that_is_none(model: Path, label: str) -> None:
    with pytest.raises(ServiceError, match=r"--revision: .* is not of at most 64 letters"):
        resolve_model(str(model), label)


def test_a_snapshot_of_the_hub_is_named_by_its_commit(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in FILES:
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(model / name)
    assert commit_of(snapshot) == revision(snapshot) == contents(snapshot).configuration == COMMIT
    assert contents(snapshot).named().digest == COMMIT.encode()
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_bytes(b"{  }")  # edited by hand
    assert commit_of(snapshot) == "" and COMMIT not in revision(snapshot)


def test_weights_are_read_only_where_they_are_named(model: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (model / name).unlink()
        (model / name).symlink_to("/proc/self/mem")  # whose reading fails
    text = CheckpointFiles(ModelSource(model, "m"), Remembered(None))
    assert text.configuration and not text.is_changed()


def test_the_time_of_a_checkpoint_is_that_of_its_newest_file(model: Path) -> None:
    for at, path in enumerate(model.rglob("*")):
        os.utime(path, (1_000 + at, 1_000 + at))
    os.utime(model / "config.json", (5_000, 5_000))
    assert contents(model).written_s == 5_000


@pytest.mark.parametrize(
    "name", ["", "none", "./none.gguf", "../none", "org/-name", "org/name--x", "a/b/c", "org/" + "x" * 99]
)
def test_a_name_that_is_neither_here_nor_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ServiceError, match=r"^--model .*; give a directory, a GGUF file, a hub id") as error:
        resolve_model(name, "")
    assert (error.value.reason, error.value.field) == ("MODEL_NOT_FOUND", "model")
