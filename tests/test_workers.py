"""The units in which tests are shared among workers."""

import ast
from pathlib import Path

from tests.conftest import SERVICES, unit_of

ROOT = Path(__file__).parents[1]
STARTS = {"tests.system.service": {"serve"}, "tests.system.roles": {"free_ports", "four_roles"}}


def starts_services(file: Path) -> bool:
    """Whether the file imports what starts services, or finds ports for them."""
    imports = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
    return any(STARTS.get(node.module or "", set()) & {alias.name for alias in node.names} for node in imports)


def test_services_are_one_unit_and_other_files_one_each() -> None:
    assert all((ROOT / path).exists() for path in SERVICES)
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py") if starts_services(file)]
    assert len(files) > 30 and {unit_of(f"{file}::test_it[1]") for file in files} == {"services"}
    assert unit_of("tests/engine/test_idle.py::test_it[a::b]") == "tests/engine/test_idle.py"
