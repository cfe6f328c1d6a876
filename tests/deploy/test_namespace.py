"""The installed package is `sluice_server` alone, and no module of it is loaded under two names.

The folders of the repository have common names (`kernels` is also a package of Hugging Face), so that nothing may be
installed, or imported, under these."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools.config.expand import StaticModule

import sluice_server
from sluice_server.services import offline

ROOT = Path(__file__).parents[2]
SPACE = "sluice_server"
ROOMS = ("engine", "kernels", "services", "demo")
SOURCES = (SPACE, *ROOMS, "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
CPU = [path for path in (ROOT / "kernels/cpu").iterdir() if path.suffix in (".h", ".cpp")]
MODULE = re.compile(rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+(?=:|$)")
NAMED = re.compile(rf"[\"'](?:{'|'.join(ROOMS)})\.")
LEVELS = {path.name.split(".")[0] for path in (ROOT / "kernels/cpu").glob("*.so")}  # some load on other CPUs only
EXTRAS = {"ray_ring"}  # do not load without an optional extra
EVERY = f"""
LEFT_OUT = {LEVELS | EXTRAS}
import collections, importlib, os, pkgutil, sys
import sluice_server
for one in pkgutil.walk_packages(sluice_server.__path__, "sluice_server."):
    # An instruction set of another machine does not load here.
    if not one.name.endswith("__main__") and one.name.split(".")[-1] not in LEFT_OUT:
        importlib.import_module(one.name)
names = collections.defaultdict(set)
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None) and os.path.realpath(module.__file__).startswith(tuple(sys.argv[1:])):
        names[os.path.realpath(module.__file__)].add(name)
print(len(names), [found for found in names.values() if len(found) > 1])
"""


def build(folder: Path, what: str, out: Path) -> Path:
    """An sdist or a wheel of the sources in a folder, made by setuptools without a compiler."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(out)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "*.so")
        if path.is_dir():
            shutil.copytree(path, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, folder)
    return build(folder, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


def strings(path: Path) -> Iterator[str]:
    """The string literals that are not docstrings, of a file that has one like a module's name."""
    text = path.read_text()
    tree = ast.parse(text if NAMED.search(text) else "")
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


@pytest.mark.parametrize("room", ROOMS)
def test_packages_of_the_namespace_are_links_to_the_folders(room: str) -> None:
    assert os.readlink(ROOT / SPACE / room) == f"../{room}"


def test_an_sdist_has_files_and_no_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [one.name for one in archive if one.issym() or one.islnk()]
        names = {one.name.split("/", 1)[-1] for one in archive}
    assert {f"{SPACE}/{path.relative_to(ROOT)}" for path in CPU} <= names
    assert not {name for name in names if name.startswith(ROOMS)}


def test_a_wheel_of_the_sdist_takes_one_name_and_has_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {SPACE}
    wanted = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    wanted += [
        path
        for kind in ("demo/*/*.*", "kernels/triton/tuned/*.json", "services/edge/page.html")
        for path in ROOT.glob(kind)
        if path.suffix != ".pyc"
    ]
    assert {f"{SPACE}/{path.relative_to(ROOT)}" for path in wanted} <= names


def test_a_wheel_made_without_a_compiler_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "from sluice_server.engine.worker.startup.formats import notes_of; import sluice_server, torch;"
        "print(sluice_server.__file__, *notes_of(torch.float32, ''))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and "slower" in done.stdout


def test_no_module_has_two_names() -> None:
    command = [sys.executable, "-c", EVERY, *(f"{ROOT / room}/" for room in (SPACE, *ROOMS))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num, twice = done.stdout.split(" ", 1)
    assert int(num) > 100 and twice == "[]\n"


def test_the_import_alone_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, sluice_server; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_namespace_has_the_names_of_the_offline_api() -> None:
    names = sluice_server.__all__
    assert set(names) <= set(offline.__all__) and {"LLM", "EmbeddingOutput", "SamplingParams"} <= set(names)
    assert [getattr(sluice_server, name) for name in names] == [getattr(offline, name) for name in names]


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sluice_server' has no attribute 'Robot'"):
        _ = sluice_server.Robot


def test_setuptools_reads_the_version_without_an_import() -> None:
    spec = importlib.util.spec_from_file_location("unused", ROOT / SPACE / "version.py")
    assert spec is not None
    assert sluice_server.__version__ == StaticModule("unused", spec).VERSION


def test_strings_name_modules_in_the_namespace() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {text}"
        for room in (*ROOMS, "tests", "benchmarks", "tools")
        for path in (ROOT / room).rglob("*.py")
        for text in strings(path)
        if (named := MODULE.match(text)) and (ROOT / named[0].replace(".", "/")).with_suffix(".py").exists()
    ]
    assert wrong == []
