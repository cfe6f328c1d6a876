import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.token import token
from sluice_server.services.gateway.access.identity import Identity, Scope, read_access

NEW = (sys.executable, "-m", "sluice_server", "token", "new", "--tenant")
FULL = """[tenants.acme]

[[certificates]]
name = "a"
tenant = "acme"
scopes = ["generate"]"""  # without a line break at its end


@pytest.mark.parametrize("before", ["", FULL])
def test_keys_that_are_appended_are_known(tmp_path: Path, before: str) -> None:
    file = tmp_path / "access.toml"
    file.write_text(before)
    keys = []
    for tenant in ('a"b', "acme"):
        with file.open("ab") as appended:
            made = subprocess.run(
                [*NEW, tenant, "--scopes", "generate, admin"],
                stdout=appended,
                stderr=subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")},
                text=True,
                timeout=60,
                check=True,
            )
        keys.append(made.stderr.strip())
    access = read_access(file)
    scopes = frozenset({Scope.GENERATE, Scope.ADMIN})
    assert [access.by_key(key) for key in keys] == [Identity('a"b', scopes), Identity("acme", scopes)]
    assert not any(key in file.read_text() for key in keys)


def test_an_unknown_scope_is_refused() -> None:
    made = CliRunner().invoke(token, ["new", "--tenant", "a", "--scopes", "root"])
    assert isinstance(made.exception, ServiceError)
    with pytest.raises(ServiceError, match="root"):
        raise made.exception
