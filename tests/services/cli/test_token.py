from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ServiceError
from services.cli.token import token
from services.gateway.access.identity import Identity, Scope, read_access


def test_a_new_key_and_its_lines_fit_together(tmp_path: Path) -> None:
    made = CliRunner().invoke(token, ["new", "--tenant", 'a"b', "--scopes", "generate, admin"])
    key, _, lines = made.output.partition("\n")
    file = tmp_path / "access.toml"
    file.write_text(lines)
    assert read_access(file).by_key(key) == Identity('a"b', frozenset({Scope.GENERATE, Scope.ADMIN}))


def test_an_unknown_scope_is_refused() -> None:
    made = CliRunner().invoke(token, ["new", "--tenant", "a", "--scopes", "root"])
    assert isinstance(made.exception, ServiceError)
    with pytest.raises(ServiceError, match="root"):
        raise made.exception
