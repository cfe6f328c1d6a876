"""The file of `sluice ray up`, and what each process is told."""

from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.ray_up import SETTINGS
from sluice_server.services.config import parse_peers
from sluice_server.services.launch.cluster import MAX_REPLICAS, ClusterFile, environment, members_of, read
from sluice_server.services.messages.processes import Role

WHOLE = """
name: cell-a
address: 10.0.0.1:6379
roles:
  gateway: {replicas: 2}
  engine: {replicas: 3, cpus: 4, gpus: 1}
serve: {model: demo, max-num-seqs: 32, reflection: false, log-level: info}
"""


def made(folder: Path, text: str) -> ClusterFile:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read(path, SETTINGS)


def test_a_file_names_the_processes_and_what_they_take(tmp_path: Path) -> None:
    found = members_of(made(tmp_path, WHOLE))
    ids = ["gateway-0", "gateway-1", "tokenizer-0", "engine-0", "engine-1", "engine-2", "detokenizer-0"]
    assert [one.process_id for one in found] == ids
    assert {(one.cpus, one.gpus) for one in found if one.role is Role.ENGINE} == {(4.0, 1.0)}
    assert len({one.port for one in found}) == len(found)


def test_each_process_is_told_its_place_and_all_others(tmp_path: Path) -> None:
    cluster = made(tmp_path, WHOLE)
    members = members_of(cluster)
    hosts = {one.process_id: f"10.0.0.{number}" for number, one in enumerate(members)} | {"engine-2": "fd00::2"}
    told = environment(cluster, members[4], hosts)
    assert (told["SLUICE_ROLE"], told["SLUICE_PROCESS_ID"]) == ("engine", "engine-1")
    assert (told["SLUICE_MAX_NUM_SEQS"], told["SLUICE_REFLECTION"], told["SLUICE_MODEL"]) == ("32", "0", "demo")
    assert told["SLUICE_INBOX"] == f"tcp://10.0.0.4:{members[4].port}"
    for role in Role:
        peers = parse_peers(role, told[f"SLUICE_{role.upper()}_PEERS"])
        assert list(peers) == [one.process_id for one in members if one.role is role]
    assert "tcp://[fd00::2]:" in told["SLUICE_ENGINE_PEERS"]
    assert {name.removeprefix("SLUICE_").lower() for name in told} <= set(SETTINGS)


def test_everything_has_a_default(tmp_path: Path) -> None:
    assert [one.process_id for one in members_of(made(tmp_path, "{}"))] == [f"{role}-0" for role in NAMES]


NAMES = ("gateway", "tokenizer", "engine", "detokenizer")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("roles: {engine: {replicas: 17}}", f"<= {MAX_REPLICAS}"),
        ("roles: {engine: {replicas: 0}}", ">= 1"),
        ("roles: {engine: {replica: 3}}", "unknown field `replica`"),
        ("roles: {worker: {}}", "unknown field `worker`"),
        ("name: A B", "matching regex"),
        ("port: 80", ">= 1024"),
        ("serve: {role: engine}", "serve.role is decided by the launcher"),
        ("serve: {ring-keys: x}", "serve.ring-keys is decided by the launcher"),
        ("serve: {modell: x}", "serve.modell is no option"),
        ("serve: [a]", "Expected `object`"),
        ("roles: {engine: [", "cluster.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ServiceError) as caught:
        made(tmp_path, text)
    assert said in caught.value.message and "cluster.yaml" in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"none\.yaml"):
        read(tmp_path / "none.yaml", SETTINGS)
