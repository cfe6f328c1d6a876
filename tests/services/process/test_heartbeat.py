"""Signs of life: written, read, and judged."""

from pathlib import Path

import pytest

from sluice_server.services.process import heartbeat
from sluice_server.services.process.heartbeat import Heartbeat, HeartbeatRecord, path_of, read


def test_a_sign_is_read_back_with_its_patience(tmp_path: Path) -> None:
    heart = Heartbeat(str(tmp_path / "run"), "engine-0")
    assert read(tmp_path / "run", "engine-0") is None  # none yet in this life
    heart.beat(step_s=2.0)
    sign = read(tmp_path / "run", "engine-0")
    assert sign is not None and sign.patience_s == 20.0
    heart.beat()
    later = read(tmp_path / "run", "engine-0")
    heart.close()
    assert later is not None and later.patience_s == heartbeat.PATIENCE_S and later.at_s >= sign.at_s
    assert path_of(tmp_path / "run", "engine-0").stat().st_mode & 0o777 == 0o600


def test_silence_is_stuck_only_beyond_patience() -> None:
    sign = HeartbeatRecord(at_s=100.0, patience_s=5.0)
    assert not sign.is_stuck(105.0)
    assert sign.is_stuck(105.1)


def test_a_new_life_begins_without_a_sign(tmp_path: Path) -> None:
    first = Heartbeat(str(tmp_path), "a")
    first.beat()
    first.close()
    Heartbeat(str(tmp_path), "a").close()
    assert read(tmp_path, "a") is None


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heart = Heartbeat("", "a")
    heart.beat()
    heart.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Heartbeat(str(tmp_path / "file"), "a")


def test_rings_of_a_process_do_not_overwrite_what_another_one_notes(tmp_path: Path) -> None:
    def said() -> str:
        record = read(tmp_path, "gateway-0")
        return "" if record is None else record.note

    heart = Heartbeat(str(tmp_path), "gateway-0")
    heart.beat()
    heart.note("older processes", "ring-a")
    heart.note("", "ring-b")
    assert said() == "older processes"
    heart.note("no engine", "ring-b")
    assert said() == "older processes; no engine"
    heart.note("", "ring-a")
    assert said() == "no engine"
    heart.note("", "ring-b")
    assert said() == ""
    heart.close()
