"""The file that `sluice profile` writes."""

import hashlib
import io

import pytest
import typer
from sluice.v1 import control_pb2

from sluice_server.services.cli.profile import HOW_TO_OPEN, Kind, default_name, write


def parts(data: bytes, digest: str) -> list[control_pb2.ProfileResponse]:
    return [
        control_pb2.ProfileResponse(started=control_pb2.ProfileStarted(process="engine-0")),
        control_pb2.ProfileResponse(data=data[:2]),
        control_pb2.ProfileResponse(data=data[2:]),
        control_pb2.ProfileResponse(finished=control_pb2.ProfileFinished(bytes=len(data), sha256=digest)),
    ]


def test_the_parts_make_the_file() -> None:
    file = io.BytesIO()
    end = write(iter(parts(b"abcde", hashlib.sha256(b"abcde").hexdigest())), file)
    assert file.getvalue() == b"abcde" and end.bytes == 5


@pytest.mark.parametrize("bad", [parts(b"abcde", "0" * 64), parts(b"abcde", "")[:-1], []])
def test_a_file_that_is_not_whole_is_an_error(bad: list[control_pb2.ProfileResponse]) -> None:
    with pytest.raises(typer.Exit):
        write(iter(bad), io.BytesIO())


def test_names_say_process_and_kind_and_lead_nowhere_else() -> None:
    assert default_name(Kind.TORCH, "", "now") == "sluice-engine-torch-now.json.gz"
    assert default_name(Kind.STACKS, "../g 0", "now") == "sluice-___g_0-stacks-now.speedscope.json.gz"
    assert set(HOW_TO_OPEN) == set(Kind)
