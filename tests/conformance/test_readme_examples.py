"""The examples of the TypeScript and Go clients' pages: compiled against the package as it is installed, and run."""

import re
from pathlib import Path

import pytest

from tests.conformance.commands import run
from tests.conformance.go_module import Consumer
from tests.conformance.sdks import CLIENTS, SDKS
from tests.system.service import Service


@pytest.mark.long
def test_the_typescript_examples_run(service: Service) -> None:
    """The examples run beside the driver, where the tarball is installed with its own compiler and node's types."""
    prepare("typescript")
    folder = CLIENTS / "typescript" / "build" / "examples"
    folder.mkdir(exist_ok=True)
    options = ("--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck")
    for number, example in enumerate(examples("typescript", "ts", service)):
        (folder / f"{number}.mts").write_text(example)
        run("npx", "tsc", *options, f"{number}.mts", cwd=folder)
        assert "INVALID_PARAMETER [ 'max_tokens' ]" in run("node", f"{number}.mjs", cwd=folder)


@pytest.mark.long
def test_the_go_examples_run(tmp_path: Path, service: Service) -> None:
    prepare("go")
    consumer = Consumer(tmp_path)
    for number, example in enumerate(examples("go", "go", service)):
        assert "INVALID_PARAMETER [max_tokens]" in consumer.run(example, f"example{number}")


def prepare(name: str) -> None:
    """Builds the SDK's driver, and with it its package; skips if that fails."""
    (sdk,) = (one for one in SDKS if one.name == name)
    if reason := sdk.build():
        pytest.skip(reason)


def examples(name: str, block: str, service: Service) -> list[str]:
    """The examples of the SDK's page, with this server's address."""
    found = re.findall(rf"```{block}\n(.*?)```", (CLIENTS / name / "README.md").read_text(), re.S)
    assert found
    return [example.replace("127.0.0.1:50051", service.address) for example in found]
