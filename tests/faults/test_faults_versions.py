"""Processes of two releases in one ring: each version is reported once, by name, and no request hangs."""

import json
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import inference_pb2

from sluice_server.services.messages.messages import SCHEMA_VERSION
from tests.faults.faulty import faults
from tests.system.roles import Roles, four_roles, sluice
from tests.system.service import spec, wait_until

OTHER = SCHEMA_VERSION + 1
OTHER_RELEASE = faults(schema=OTHER)
NEIGHBOURS = {"tokenizer": "engine", "engine": "detokenizer", "detokenizer": "gateway", "gateway": "tokenizer"}


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """The four roles, starting with a tokenizer of another release."""
    directory = tmp_path_factory.mktemp("ring")
    environment = {
        "SLUICE_RECOVERY_TIMEOUT_S": "2",
        "SLUICE_LOG_FORMAT": "json",
        "SLUICE_HEARTBEAT_DIR": str(directory / "alive"),
    }
    with four_roles(directory / "keys", environment=environment, of_one={"tokenizer": OTHER_RELEASE}) as running:
        yield running


def refusal(roles: Roles) -> tuple[str, str, str]:
    """Code, reason and message of a call that fails now."""
    with roles.service.stub() as stub:
        try:
            for _ in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec("a", 8)), timeout=60):
                pass
        except grpc.RpcError as error:
            return told(error)
    return "OK", "", ""


def told(error: grpc.RpcError) -> tuple[str, str, str]:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details[0].Unpack(info):
        return error.code().name, "", str(error.details())
    return error.code().name, info.reason, status.message


def is_named(roles: Roles, role: str) -> bool:
    """Whether an error names both processes and versions, as the next process or this one sees them."""
    code, reason, message = refusal(roles)
    versions = f"version {OTHER}" in message and f"version {SCHEMA_VERSION}" in message
    return (code, reason) == ("UNAVAILABLE", "SCHEMA_MISMATCH") and f"{role}-0" in message and versions


def lines(roles: Roles, role: str) -> list[str]:
    """The log lines of a process about a peer's version."""
    written = [json.loads(line) for line in roles.log(role).read_text().splitlines() if line.startswith("{")]
    return [one["message"] for one in written if "are refused" in one["message"]]


def is_noted(roles: Roles) -> bool:
    """Whether the engine's healthcheck reports its peer's version. It stays healthy: a restart would mend nothing."""
    health = sluice("healthcheck", "--role", "engine", "--heartbeat-dir", str(roles.log("engine").parent / "alive"))
    assert health.returncode == 0
    return f"refuses frames of tokenizer-0 (version {OTHER}); it reads version {SCHEMA_VERSION}" in health.stdout


def test_a_neighbour_of_another_release_is_refused_by_name(roles: Roles) -> None:
    wait_until(lambda: is_named(roles, "tokenizer"), 60, "a client is not told of the versions")
    assert not roles.is_serving()
    for reader, reads, sender, sends in (
        ("engine", SCHEMA_VERSION, "tokenizer", OTHER),
        ("tokenizer", OTHER, "gateway", SCHEMA_VERSION),
    ):
        (line,) = lines(roles, reader)
        who = f"the process {sender}-0 of this server sends messages of version {sends}, and {reader}-0 reads {reads}"
        assert line.replace("reads version", "reads").startswith(f"frames of {sender}-0 are refused: {who}")
    wait_until(lambda: is_noted(roles), 60, "healthcheck does not say what keeps the engine from its work")
    roles.replace("tokenizer")
    wait_until(roles.is_serving, 60, "the service did not become ready when all were of one release")


@pytest.mark.long
@pytest.mark.parametrize("role", ["detokenizer", "engine"])
def test_a_process_that_comes_back_of_another_release_ends_streams_by_name(roles: Roles, role: str) -> None:
    wait_until(roles.is_serving, 60, "the service is not ready")
    before = len(lines(roles, NEIGHBOURS[role]))
    with roles.service.stub() as stub:
        request = inference_pb2.StreamGenerateRequest(spec=spec("def f(", 1900))
        call = stub.StreamGenerate(request, timeout=60)
        next(call)
        roles.replace(role, OTHER_RELEASE)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
    code, reason, message = told(caught.value)
    assert (code, reason) == ("UNAVAILABLE", "SCHEMA_MISMATCH") and f"{role}-0" in message
    assert is_named(roles, role)
    assert len(lines(roles, NEIGHBOURS[role])) == before + 1
    roles.replace(role)
    wait_until(roles.is_serving, 60, "the service did not recover")
