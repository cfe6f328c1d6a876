from pathlib import Path

import pytest
import sluice
from typer.testing import CliRunner

from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.client import client
from sluice_server.services.cli.connection_options import ConnectionOptions
from sluice_server.services.cli.main import app


def test_a_key_is_never_sent_to_others_in_plaintext() -> None:
    none = (None, None, None)
    with pytest.raises(ServiceError, match="plaintext"):
        ConnectionOptions.of("example.org:50051", False, none, "k")
    assert ConnectionOptions.of("127.0.0.1:50051", False, none, "k").metadata == (("authorization", "Bearer k"),)
    assert ConnectionOptions.of("example.org:50051", True, none, "k").has_tls
    assert not ConnectionOptions.of("example.org:50051", False, none, None).metadata


def test_files_mean_tls_and_are_read(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(ServiceError, match="No such file"):
        client("localhost:1", ConnectionOptions.of("localhost:1", False, (ca, None, None), None))
    ca.write_text("")
    with client("localhost:1", ConnectionOptions.of("localhost:1", False, (ca, None, None), None)) as opened:
        assert isinstance(opened, sluice.Client)
    with pytest.raises(ServiceError, match="needed together"):
        ConnectionOptions.of("localhost:1", False, (None, ca, None), None)


@pytest.mark.parametrize("command", [["generate", "hi"], ["embed", "hi"], ["rerank", "hi", "a"], ["classify", "hi"]])
@pytest.mark.parametrize("timeout", ["-1", "0"])
def test_a_deadline_that_has_passed_is_a_wrong_option(command: list[str], timeout: str) -> None:
    done = CliRunner().invoke(app, [*command, "--timeout", timeout])
    assert done.exit_code == 2 and "--timeout" in done.output and "0.001" in done.output
