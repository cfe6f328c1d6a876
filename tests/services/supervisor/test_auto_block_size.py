"""The block size of a service with `auto`: chosen once, said, and refused where processes would not agree."""

import dataclasses
from pathlib import Path

import pytest

from sluice_server.engine.config import AUTO, EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.block_size import NUM_ENDS, Traffic
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.alone import run_alone
from sluice_server.services.process.traffic_files import prefix_of, write
from sluice_server.services.supervisor.block_size import with_any_size, with_block_size
from tests.oracle.checkpoints import Shape, make_checkpoint

WANTED = EngineConfig(block_size=AUTO["auto"])
SMALLER = Traffic(
    32, 4096, 100, 20_000, tuple(100 * (at == 5) for at in range(NUM_ENDS)), token_s=1e-3
)  # asks for blocks of 16


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remembered.cache_clear()
    return make_checkpoint(tmp_path / "model", Shape(layers=4, kv_heads=4, head_dim=64))


def chosen(engine: EngineConfig, model: Path) -> tuple[int, str, str]:
    """The size, what was said, and the files that engines write."""
    said: list[str] = []
    found, service = with_block_size(engine, ServiceConfig(model=str(model)), model, said.append)
    return found.block_size, " ".join(said), service.traffic_file


def test_it_is_chosen_by_the_run_before_and_said(model: Path) -> None:
    size, said, prefix = chosen(WANTED, model)
    assert (size, said) == (32, "sluice: --block-size auto takes 32: no run of this model was measured")
    assert prefix == prefix_of(WANTED, str(model), "")
    write(prefix, "engine-0", SMALLER)
    size, said, _ = chosen(WANTED, model)
    assert size == 16 and said.startswith("sluice: --block-size auto takes 16: it would have saved 8.0 %")
    assert chosen(dataclasses.replace(WANTED, kv_cache_dtype="int8"), model)[0] == 32  # another cache, another run
    assert chosen(dataclasses.replace(WANTED, kv_cache_tokens=64 * 33), model)[0] == 16
    assert chosen(EngineConfig(block_size=8), model) == (8, "", "")


def test_a_cache_that_is_kept_keeps_its_size(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "blocks" / "engine-0"
    folder.mkdir(parents=True)
    engine = dataclasses.replace(WANTED, disk_cache_dir=str(folder.parent), disk_cache_bytes=1 << 20)
    write(prefix_of(engine, str(model), ""), "engine-0", SMALLER)
    (folder / "other.kv").write_bytes(bytes(100))
    assert chosen(engine, model)[0] == 16
    for at in range(50):
        (folder / f"{at:064x}.kv").write_bytes(bytes(32 + 4096))
    size, said, _ = chosen(engine, model)
    assert size == 32 and f"{folder.parent} keeps 1600 tokens in blocks of this size" in said


def test_it_is_refused_where_others_would_not_know_it() -> None:
    for name, engine, service in (
        ("--models", WANTED, ServiceConfig(models="m.toml")),
        ("--kv-store", dataclasses.replace(WANTED, kv_store="/s"), ServiceConfig()),
        ("--kv-port-offset", WANTED, ServiceConfig(kv_port_offset=1)),
        ("--rank-peers", WANTED, ServiceConfig(rank_peers="a=tcp://b:1")),
        ("--kv-cache-tokens 100", dataclasses.replace(WANTED, kv_cache_tokens=100), ServiceConfig()),
    ):
        with pytest.raises(ServiceError) as caught:
            with_any_size(engine, service)
        assert caught.value.field == "block_size" and name in caught.value.message
    with pytest.raises(ServiceError, match="--block-size: auto is for `sluice serve` of one model"):
        run_alone(WANTED, ServiceConfig(role="tokenizer"))
    assert with_any_size(EngineConfig(), ServiceConfig(models="m.toml")) == EngineConfig()
