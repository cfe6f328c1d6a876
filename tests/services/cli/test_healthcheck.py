"""The answers of a container's health check."""

import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice_server.services.cli.main import app
from sluice_server.services.process.heartbeat import Heartbeat, path_of


def probe(directory: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["healthcheck", "--role", "engine", "--heartbeat-dir", str(directory), *options])
    return result.exit_code, result.output


def test_alive_stuck_and_not_yet(tmp_path: Path) -> None:
    assert probe(tmp_path) == (1, f"engine-0: no sign of life yet in {tmp_path}\n")
    Heartbeat(str(tmp_path), "engine-0").beat()
    status, said = probe(tmp_path)
    assert status == 0 and said.startswith("engine-0: alive 0.")
    assert probe(tmp_path, "--role", "edge") == (1, f"edge-0: no sign of life yet in {tmp_path}\n")
    path_of(tmp_path, "engine-7").write_bytes(struct.pack("<dd", 0.0, 0.5))
    status, said = probe(tmp_path, "--process-id", "engine-7")
    assert status == 1 and said.startswith("engine-7: stuck, no sign of life for ")


@pytest.mark.parametrize("options", [["--role", "engin", "--heartbeat-dir", "."], ["--role", "engine"]])
def test_wrong_options_are_said(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_HEARTBEAT_DIR", raising=False)
    result = CliRunner().invoke(app, ["healthcheck", *options])
    assert result.exit_code != 0
