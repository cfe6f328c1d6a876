"""The engine imports no tokenizer: the compiler of grammars is passed to it."""

import ast
from pathlib import Path

from sluice_server import engine

ROOT = Path(engine.__file__).parent


def test_no_tokenizer_is_read_or_made_in_the_engine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and node.value == "tokenizer.json")
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LLTokenizer")
    ]
    assert found == []
