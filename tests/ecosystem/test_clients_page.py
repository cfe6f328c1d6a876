"""The page of other projects' clients names what there is. Installs nothing."""

import re

from tests.ecosystem.clients_of_others import SCRIPTS, clients


def test_each_script_has_a_row_and_each_row_its_script() -> None:
    rows = [client.script for client in clients()]
    assert rows and sorted(rows) == sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".mjs"))


def test_each_door_is_one_that_there_is() -> None:
    assert {client.door for client in clients()} == {"HTTP", "gRPC", "SMG"}


def test_versions_are_exact() -> None:
    for client in clients():
        for package in client.packages:
            assert re.fullmatch(r"@?[\w/-]+(\[\w+\])?(==|@)[\d.]+", package), package
