"""Where no images are taken: the reason by name, which requests with images are told."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.registry import read_served
from sluice_server.services.media.serving import limits_for
from tests.oracle.vision_checkpoints import make_served_llava

CPU = EngineConfig(device="cpu", dtype="float32")
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "one process": ({}, ""),
    "two ranks": ({"tensor_parallel_size": 2}, ""),
    "two stages": ({"pipeline_parallel_size": 2}, ""),
    "a GPU": ({"device": "cuda"}, "--device cpu"),
    "two GPUs": ({"device": "cuda", "tensor_parallel_size": 2}, "--device cpu"),
    "none wanted": ({"images": False}, "--no-images"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    make_served_llava(path)
    return path


@pytest.mark.parametrize(("changes", "named"), REASONS.values(), ids=REASONS.keys())
def test_images_are_taken_or_refused_by_the_name_of_what_excludes_them(
    changes: dict[str, Any], named: str, path: Path
) -> None:
    limits = limits_for(dataclasses.replace(CPU, **changes), read_served(path), path, 1 << 20)
    assert (limits.images is None) == bool(named)
    assert named in limits.why_no_images


def test_a_gpu_that_is_there_counts_as_one_that_was_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, there = dataclasses.replace(CPU, device="auto"), Path("/dev/null")
    for gpu, is_taken in ((path / "none", True), (there, False)):
        monkeypatch.setattr("sluice_server.services.media.serving.GPU", gpu)
        assert (limits_for(auto, read_served(path), path, 1 << 20).images is not None) == is_taken
