"""Which processes a service starts, and what each of them is told."""

import dataclasses
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.supervisor.plan import plan_children


def test_every_process_gets_the_same_table_and_its_own_place(tmp_path: Path) -> None:
    children = plan_children(EngineConfig(), ServiceConfig(tokenizers=2, metrics_port=9000), tmp_path)
    assert [child.process_id for child in children] == [
        "engine-0",
        "gateway-0",
        "tokenizer-0",
        "tokenizer-1",
        "detokenizer-0",
    ]
    assert len({child.environment["SLUICE_TOKENIZER_PEERS"] for child in children}) == 1
    assert {child.environment["SLUICE_INBOX"] for child in children} == {
        f"ipc://{tmp_path}/{child.process_id}" for child in children
    }
    assert [child.environment["SLUICE_METRICS_PORT"] for child in children] == [str(9000 + i) for i in range(5)]


def test_engines_share_the_cores_and_the_disk_cache_but_not_those_of_several_ranks(tmp_path: Path) -> None:
    chosen = EngineConfig(disk_cache_dir="/cache")
    children = plan_children(chosen, ServiceConfig(engines=2), tmp_path)
    engines = [child.environment for child in children if child.role is Role.ENGINE]
    assert [one["SLUICE_DISK_CACHE_DIR"] for one in engines] == ["/cache"] * 2
    assert [int(one["SLUICE_THREADS"]) for one in engines] == [max(1, find_cores().usable // 2)] * 2
    assert {one["SLUICE_ENGINES_FILE"] for one in engines} == {f"{tmp_path}/engines.toml"}
    ranked = plan_children(dataclasses.replace(chosen, tensor_parallel_size=2), ServiceConfig(engines=2), tmp_path)
    folders = {child.environment["SLUICE_DISK_CACHE_DIR"] for child in ranked if child.group}
    assert folders == {"/cache/engine-0", "/cache/engine-1"}
    (alone,) = [child for child in plan_children(chosen, ServiceConfig(), tmp_path) if child.role is Role.ENGINE]
    assert (alone.environment["SLUICE_DISK_CACHE_DIR"], alone.environment["SLUICE_THREADS"]) == ("/cache", "0")
