"""The generated stubs of other languages are up to date with the contract. Python has its own test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import google.rpc
import pytest

from tests.conformance.sdks import CLIENTS, ROOT, SDKS

PLACES = {"typescript": Path("src/gen"), "go": Path("sluicev1")}


@pytest.mark.long
@pytest.mark.parametrize("name", PLACES)
def test_stubs_made_again_are_the_same(name: str, tmp_path: Path) -> None:
    (sdk,) = (one for one in SDKS if one.name == name)
    if (reason := sdk.build()) or (reason := "" if name != "go" or shutil.which("protoc-gen-go-grpc") else "no plugin"):
        pytest.skip(reason)
    folder = tmp_path / "clients" / name
    (folder / "src").mkdir(parents=True)
    shutil.copy(CLIENTS / name / "stubs.sh", folder)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    (folder / "node_modules").symlink_to(CLIENTS / name / "node_modules")
    roots = next(iter(google.rpc.__path__))
    made = {"PROTOC": f"{sys.executable} -m grpc_tools.protoc", "GOOGLE_PROTOS": str(Path(roots).parent.parent)}
    subprocess.run(["sh", str(folder / "stubs.sh")], env={**os.environ, **made}, check=True, capture_output=True)
    assert texts(folder / PLACES[name]) == texts(CLIENTS / name / PLACES[name])


def texts(folder: Path) -> dict[str, str]:
    """The texts of all files, by path."""
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found
    return found
