"""The engine's own classes through random histories: nothing lost, nothing leaked, nobody starved, all reproducible."""

import ast
from pathlib import Path

import pytest

from tests.engine.scheduler.simulate import Simulation

HERE = Path(__file__).parent
EVENTS = 20_000


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    Simulation(seed).run(EVENTS)


def test_equal_seeds_give_equal_traces() -> None:
    assert Simulation(3).run(3000) == Simulation(3).run(3000)
    assert Simulation(3).run(3000) != Simulation(4).run(3000)


@pytest.mark.parametrize("name", ["simulate.py", "ledger.py", "fake_model.py"])
def test_the_simulator_drives_the_very_classes_that_the_engine_imports(name: str) -> None:
    """It may neither subclass nor patch them: what it proves would be about something else."""
    tree = ast.parse((HERE / name).read_text())
    ours = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine.")
        for alias in node.names
    }
    assert ours, "it imports the engine"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not {base.id for base in node.bases if isinstance(base, ast.Name)} & ours, "subclasses one of ours"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                path = ast.unparse(target)
                assert path.split(".")[0] not in ours, f"patches {path}"
                assert not path.startswith(("self.scheduler.", "self.cache.")), f"patches {path}"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("setattr", "object.__setattr__", "patch", "monkeypatch.setattr")
