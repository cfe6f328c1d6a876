"""Each field of the scheduler's shared records is written by the modules that the documented table names."""

import ast
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine import scheduler

ROOM = Path(scheduler.__file__).parent
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "sort", "update"}


def written(source: str) -> set[str]:
    """Fields of other objects that the source assigns, deletes or changes in place, not through another name."""
    return {one.attr for one in _targets(ast.parse(source)) if ast.unparse(one.value) != "self"}


def _targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value if isinstance(node, ast.Subscript) else node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if isinstance(target, ast.Attribute):
            yield target


def test_each_way_to_write_a_field_is_seen() -> None:
    source = "a.b = 1\nc.d += 1\ne.f[0] = 1\ndel g.h[:]\ni.j.append(1)\nk.l, m = 1, 2\n(self.n.o, self.p) = 1, 2\n"
    assert written(source) == {"b", "d", "f", "h", "j", "l", "o"}
    assert written("self.a = b.c\nself.d.append(b.e)\nf.append(b.g)\nb.h.count(1)") == set()


def test_fields_are_written_by_whom_the_table_names() -> None:
    found: dict[str, set[str]] = {}
    for path in ROOM.glob("*.py"):
        for field in written(path.read_text()):
            found.setdefault(field, set()).add(path.stem)
    assert found == {field: set(modules) for field, modules in scheduler.WRITERS.items()}
