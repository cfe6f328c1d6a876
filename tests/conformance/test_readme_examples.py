"""The examples of the TypeScript and Go clients' pages: compiled against the package as it is installed, and run."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.sdks import CLIENTS, SDKS
from tests.system.service import Service


def run_typescript(example: str, name: str) -> str:
    """Beside the driver, where the tarball is installed; its own compiler and node's types are found above."""
    folder = CLIENTS / "typescript" / "build" / "examples"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.mts").write_text(example)
    options = ("--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck")
    run(folder, "npx", "tsc", *options, f"{name}.mts")
    return run(folder, "node", f"{name}.mjs")


def run_go(example: str, name: str) -> str:
    """In the tree of sources in which the driver was built."""
    tree = CLIENTS / "go" / "build" / "gopath"
    folder = tree / "src" / "example.com" / "examples" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.go").write_text(example)
    environment = ("env", "GO111MODULE=off", f"GOPATH={tree}:/usr/share/gocode")
    assert not run(folder, "gofmt", "-l", "main.go"), "not as gofmt has it"
    run(folder, *environment, "go", "vet", ".")
    return run(folder, *environment, "go", "run", ".")


def run(folder: Path, *command: str) -> str:
    """What it says; it must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("name", "block", "runs"), [("typescript", "ts", run_typescript), ("go", "go", run_go)])
def test_the_examples_run(name: str, block: str, runs: Callable[[str, str], str], service: Service) -> None:
    (sdk,) = (one for one in SDKS if one.name == name)
    if reason := sdk.build():
        pytest.skip(reason)
    examples = re.findall(rf"```{block}\n(.*?)```", (CLIENTS / name / "README.md").read_text(), re.S)
    assert examples
    for number, example in enumerate(examples):
        told = runs(example.replace("127.0.0.1:50051", service.address), f"example{number}")
        assert "INVALID_PARAMETER" in told and "max_tokens" in told
