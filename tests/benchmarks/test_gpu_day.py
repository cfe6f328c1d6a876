"""The stages of a GPU day: the commands they run, isolation of a failure, and the time limit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import ROOT, STAGES, Step, sanitized


@pytest.fixture(autouse=True)
def no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "TUNED", tmp_path / "tuned")


def stage(monkeypatch: pytest.MonkeyPatch, *steps: Step) -> None:
    monkeypatch.setitem(STAGES, "engines", steps)


def ended(out: Path) -> list[object]:
    return [one["ended"] for one in json.loads((out / "engines.json").read_text()).values()]


def test_a_failing_command_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; print('interpreted', os.environ['TRITON_INTERPRET'])"
    stage(monkeypatch, Step("a", ("-c", "raise SystemExit(3)")), Step("b", ("-c", code)))
    assert gpu_day.main(["engines", "--out", str(tmp_path / "new" / "out")]) == 1
    out = tmp_path / "new" / "out"
    assert ended(out) == [3, 0] and (out / "engines.log").read_text() == "interpreted 0\n"


def test_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, Step("a", ("-c", "import signal; signal.pause()")), Step("b", ("-c", "")))
    assert gpu_day.main(["engines", "--out", str(tmp_path), "--seconds", "0.5"]) == 1
    assert ended(tmp_path) == ["out of time", "no time"]


def test_a_tool_that_is_not_here_is_said_and_skipped_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(monkeypatch, Step("a", ("-c", ""), tool=("no-such-tool",)))
    assert gpu_day.main(["engines", "--out", str(tmp_path)]) == 1
    assert ended(tmp_path) == ["no-such-tool is not here"]
    assert gpu_day.main(["engines", "--out", str(tmp_path), "--dry-run"]) == 0


def test_a_benchmark_is_told_where_for_how_long_and_whether_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; print(os.environ['TRITON_INTERPRET'], *sys.argv[1:])"
    stage(monkeypatch, Step("a", ("-c", code), is_benchmark=True))
    assert gpu_day.main(["engines", "--out", str(tmp_path), "--seconds", "100", "--dry-run"]) == 0
    told = (tmp_path / "engines.log").read_text().split()
    assert told[:3] == ["1", "--out", str(tmp_path)] and told[3] == "--seconds" and told[-1] == "--dry-run"
    assert 80 <= float(told[4]) <= 85


def test_every_stage_runs_what_there_is() -> None:
    modules, files = set(), set()
    for step in (step for steps in STAGES.values() for step in steps):
        assert step.command[0] == "-m"
        modules.add(step.command[1])
        files |= {word for word in step.command if word.startswith("tests/gpu/test_")}
    assert files == {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
    benchmarks = modules - {"pytest"}
    assert all((ROOT / f"{name.replace('.', '/')}.py").exists() for name in benchmarks)
    assert benchmarks == {
        f"benchmarks.gpu_{name}" for name in ("attention", "block_table", "kernels", "engine", "offload", "tune")
    }
    assert gpu_day.environment(sanitized("memcheck"), is_dry=False)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def test_tables_that_were_tuned_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "GPU.json").write_text("{}")
    stage(monkeypatch)
    assert gpu_day.main(["engines", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "GPU.json").exists()


def test_the_page_names_every_package_that_a_machine_with_a_gpu_needs() -> None:
    """What our own modules import there, in the benchmarks and in the tests of a GPU."""
    code = """
import builtins, sys
ours, found, given = ("benchmarks", "sluice_server", "tests"), set(), builtins.__import__
def counted(name, globals=None, *others, **named):
    if str((globals or {}).get("__name__")).split(".")[0] in ours:
        found.add(name.split(".")[0])
    return given(name, globals, *others, **named)
builtins.__import__ = counted
for name in sys.argv[1:]:
    given(name)
print(*sorted(found - set(ours) - sys.stdlib_module_names - {""}))
"""
    modules = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("gpu_*.py")]
    modules += [f"tests.gpu.{path.stem}" for path in (ROOT / "tests" / "gpu").glob("*.py") if "ranks" not in path.stem]
    told = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=True)
    page = (ROOT / "benchmarks" / "GPU.md").read_text().split("## What the machine needs")[1].split("\n\n")[1]
    assert set(told.stdout.split()) <= set(re.findall(r"\w+", page.lower()))
