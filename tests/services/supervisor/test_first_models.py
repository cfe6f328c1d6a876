"""Which models of a file are loaded at the start, by the memory that each takes."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import sluice_server.demo
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, PlannedBytes
from sluice_server.services.supervisor import first_models

TARGET = Path(sluice_server.demo.__file__).parent / "target"
GIB = 1 << 30
SIZES = {"a": 4, "b": 3, "c": 5, "d": 2, "e": 1, "small": 1}


def planned(engine: EngineConfig, service: ServiceConfig, entries: Sequence[LaneEntry]) -> list[LaneEntry]:
    sizes = [PlannedBytes(weights=SIZES[entry.model] * GIB) for entry in entries]
    return [msgspec.structs.replace(entry, planned=size) for entry, size in zip(entries, sizes, strict=True)]


def table(monkeypatch: pytest.MonkeyPatch, folder: Path, said: list[str], budget: int) -> ModelTable:
    monkeypatch.setattr(first_models, "with_plans", planned)
    text = f'default = "chat"\n[models.a]\nsource = "{TARGET}"\n[models.b]\nsource = "{TARGET}"\npinned = true\n'
    text += f'[models.c]\nsource = "{TARGET}"\nalias = "chat"\n[models.d]\nsource = "{TARGET}"\n'
    text += f'[models.e]\nsource = "{TARGET}"\nload = false\nalias = "night"\n'
    text += '[models.small]\nsource = "demo"\nload = false\n[models.hub]\nsource = "org/name"\nload = false\n'
    text += f'[models.wrong]\nsource = "{folder}"\nload = false\n'
    (folder / "models.toml").write_text(text)
    service = ServiceConfig(models=str(folder / "models.toml"), memory_budget=budget * GIB)
    return first_models.of_file(EngineConfig(), service, said.append)


def test_the_default_and_pinned_models_come_first_and_what_has_no_room_sleeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    found = table(monkeypatch, tmp_path, said, 11)
    awake = {entry.model for entry in found.lanes.values() if entry.state is LaneState.LOADING}
    assert [entry.model for entry in found.lanes.values()] == ["a", "b", "c", "d", "e", "small"]
    assert awake == {"b", "c", "d"} and found.aliases == {"chat": {"c": 1}, "night": {"e": 1}}
    assert any("the model a sleeps: the memory budget has no room" in line for line in said)
    assert any("the model wrong cannot be loaded as it is" in line for line in said) and len(said) == 3
    assert "sluice: the model hub is not known before LoadModel has fetched org/name from the hub" in said


def test_a_default_or_pinned_model_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "memory-budget: c is pinned or the default, and needs 5120 MiB; .*, or set weights-offload-bytes"
    with pytest.raises(ServiceError, match=text):
        table(monkeypatch, tmp_path, [], 7)
