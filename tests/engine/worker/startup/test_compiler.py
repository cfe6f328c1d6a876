"""What Triton needs before its first launch is named where it is missing."""

import os
from pathlib import Path

import pytest

from sluice_server.engine.worker.startup.compiler import missing


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with all that is needed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}


def test_nothing_is_missing(machine: dict[str, str], tmp_path: Path) -> None:
    assert missing(machine, tmp_path) is None


def test_a_compiler_and_headers_are_needed_until_the_cache_has_what_they_make(
    machine: dict[str, str], tmp_path: Path
) -> None:
    assert "a C compiler at its first launch (cc, gcc, clang, or CC)" in str(missing({**machine, "PATH": ""}, tmp_path))
    assert missing({**machine, "PATH": "", "CC": "/opt/cc"}, tmp_path) is None
    assert f"Python's headers at its first launch, and {tmp_path / 'bin'} has none" in str(
        missing(machine, tmp_path / "bin")
    )
    made = tmp_path / ".triton" / "cache" / "ABC"
    made.mkdir(parents=True)
    (made / "cuda_utils.so").touch()
    assert missing({**machine, "PATH": ""}, tmp_path / "bin") is None


def test_a_cache_must_be_writable_and_executable(
    machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**machine, "TRITON_CACHE_DIR": str(tmp_path / "no" / "such")}
    assert missing(given, tmp_path) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"cannot be written in {tmp_path / 'no' / 'such'}: set TRITON_CACHE_DIR" in str(missing(given, tmp_path))
    monkeypatch.undo()
    found = os.statvfs(tmp_path)
    fields = (*found[:8], found.f_flag | os.ST_NOEXEC, found[9])
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert "mounted noexec: set TRITON_CACHE_DIR" in str(missing(given, tmp_path))
