"""The CLI's view of the contract's answers."""

import errno
import json
import sys

import pytest
import sluice
import typer
from sluice.v1 import types_pb2

from sluice_server.services.cli.client import describe, told, usage_of


def test_usage_is_plain_numbers_and_lists_of_them_by_position() -> None:
    usage = types_pb2.Usage(prompt_tokens=4, drafted_tokens=3, drafted_tokens_by_position=[2, 1])
    found = json.loads(json.dumps(usage_of(usage)))
    assert (found["prompt_tokens"], found["drafted_tokens"]) == (4, 3)
    assert found["drafted_tokens_by_position"] == [2, 1]
    assert found["accepted_tokens_by_position"] == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("failed to connect to all addresses; last error: …", "no server answers at host:1; start one"),
        ("errors resolving host: [field:hostname lookup]", "--address: no host of the name in host:1 is known"),
        (
            "failed to connect …: INTERNAL: … (Trying to connect an http1.x server (HTTP status 400))",
            "host:1 speaks HTTP/1",
        ),
        ("failed to connect …: Tls handshake failed …: WRONG_VERSION_NUMBER: …", "host:1 does not speak TLS"),
        (
            "failed to connect …: Tls handshake failed …: CERTIFICATE_VERIFY_FAILED: …",
            "host:1 has a certificate that is",
        ),
        ("draining", "UNAVAILABLE: draining"),
    ],
)
def test_a_server_that_cannot_be_reached_is_one_line(message: str, said: str) -> None:
    assert describe(sluice.Unavailable(message), "host:1").startswith(said)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_output_that_cannot_be_written_is_one_line(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", sys.stdout)  # told takes it away
    with pytest.raises(typer.Exit), told("host:1"):
        raise OSError(number, "No room")
    assert sys.stdout is None and capsys.readouterr().err == "error: standard output cannot be written: No room\n"


def test_other_errors_of_the_system_are_no_output() -> None:
    with pytest.raises(FileNotFoundError), told("host:1"):
        raise FileNotFoundError(errno.ENOENT, "none")
