"""The installation on an ordinary machine: constraints fit torch's ordinary wheel and the supported Pythons. Whether
an index has all of it is checked by `make check-install`."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.check_install import CONSTRAINTS, KEPT, constraints, is_exact, pythons

ROOT = Path(__file__).parents[2]
ASKED = {
    name: [Requirement(line) for line in lines] for name, lines in json.loads(KEPT.read_text()).items()
}  # by name==version: what each package that torch's ordinary wheel needs asks for in turn


def test_what_is_kept_is_of_the_torch_that_is_pinned() -> None:
    assert f"torch=={constraints()['torch']}" in ASKED, "run make check-install UPDATE=--update"


def test_constraints_are_what_torch_for_cuda_asks_for() -> None:
    pinned = constraints()
    wrong = [
        f"{CONSTRAINTS.name} has {one.name}=={pinned[name]}, {package} asks for {one}"
        for package, asked in ASKED.items()
        for one in asked
        if (name := canonicalize_name(one.name)) in pinned and not one.specifier.contains(pinned[name])
    ]
    assert not wrong


def test_no_version_that_torch_for_cuda_needs_is_left_open() -> None:
    """Versions that torch pins exactly are left to torch, so that no two pins must change together."""
    asked = [one for each in ASKED.values() for one in each]
    settled = {canonicalize_name(one.name) for one in asked if is_exact(one)} | constraints().keys()
    assert {canonicalize_name(one.name) for one in asked} <= settled


@pytest.mark.parametrize("name", ["text", "engine"])
def test_images_install_nothing_that_is_not_pinned(name: str) -> None:
    lines = (ROOT / f"deploy/requirements-{name}.txt").read_text().splitlines()
    wanted = {canonicalize_name(line) for line in lines if line and not line.startswith(("#", "-"))}
    assert wanted and wanted <= constraints().keys()


def pretend(directory: Path, name: str, fits: bool) -> None:
    """Writes a fake Python of that name that answers the version check and notes how an environment was requested."""
    python = directory / name
    made = f'mkdir -p "$3/bin" && echo {name} > "$3/bin/python"'
    python.write_text(f"#!/bin/sh\ncase $1 in -c) exit {0 if fits else 1};; *) {made};; esac\n")
    python.chmod(0o755)


def environment(directory: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    """Runs make's environment target with only the commands of the directory and the indispensable ones."""
    for needed in ("mkdir", "sort", "grep"):
        (directory / needed).symlink_to(shutil.which(needed) or "")
    shutil.copy(ROOT / "Makefile", directory)
    command = (shutil.which("make") or "make", "-C", str(directory), ".venv/bin/python", *settings)
    return subprocess.run(command, env={"PATH": str(directory)}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": True, "python3.14": True}, "python3"),
        ({"python3": False, "python3.12": True, "python3.11": True}, "python3.12"),
        ({"python3.14": False, "python3.11": True}, "python3.11"),
    ],
)
def test_make_takes_the_first_python_that_fits(there: dict[str, bool], chosen: str, tmp_path: Path) -> None:
    for name, fits in there.items():
        pretend(tmp_path, name, fits)
    done = environment(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv/bin/python").read_text() == f"{chosen}\n"


@pytest.mark.parametrize("settings", [(), ("PYTHON=python3.9",)])
def test_make_says_what_it_looked_for_where_no_python_fits(settings: Sequence[str], tmp_path: Path) -> None:
    pretend(tmp_path, "python3", fits=False)
    pretend(tmp_path, "python3.9", fits=False)
    done = environment(tmp_path, *settings)
    assert done.returncode != 0 and not (tmp_path / ".venv").exists()
    looked = ["python3.9"] if settings else ["python3", *(f"python{one}" for one in reversed(pythons()))]
    assert f"{pythons()[0]} to {pythons()[-1]}" in done.stderr
    assert f"looked for: {' '.join(looked)}." in done.stderr


def test_make_holds_a_python_to_what_the_package_admits() -> None:
    question = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PYTHON_FITS"))
    bounds = [f"({one.replace('.', ', ')})" for one in (pythons()[0], f"3.{int(pythons()[-1][2:]) + 1}")]
    assert f"{bounds[0]} <= sys.version_info[:2] < {bounds[1]}" in question
