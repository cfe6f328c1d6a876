"""The page about `LLM`: its example runs as written, and it names every parameter."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from sluice_server.services.offline import LLM
from sluice_server.services.offline.options import fields
from sluice_server.services.offline.params import PATHS
from sluice_server.services.offline.vectors import EmbeddingOptions

PAGE = (Path(__file__).parents[3] / "docs" / "offline.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(example, "docs/offline.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("'def fibonacci(n):' → ") and said[1].startswith("'import os\\n' → ") and len(said) > 4


def test_it_names_every_option_and_parameter() -> None:
    _, options, parameters = re.split(r"^## ", PAGE, flags=re.M)
    assert set(re.findall(r"`(\w+)`", options)) >= set(fields())
    assert set(re.findall(r"`(\w+)`", parameters)) >= set(PATHS)


def test_it_shows_every_call() -> None:
    for name, call in inspect.getmembers(LLM, inspect.isfunction):
        if not name.startswith("_"):
            assert f"`{name}(" in PAGE
            given = re.findall(rf"`{name}\(([^)]*)\)", PAGE)[0]
            parameters = inspect.signature(call).parameters
            names = set(parameters) - {"self", "add_special_tokens", "skip_special_tokens"}
            if parameters.get("options"):
                names = names - {"options"} | {field.name for field in dataclasses.fields(EmbeddingOptions)}
            assert {one.partition("=")[0] for one in filter(None, given.split(", "))} == names
