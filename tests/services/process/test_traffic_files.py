"""The files of a model's traffic: what is written is read, what is damaged or another's is not."""

import dataclasses
from pathlib import Path

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.block_size import NUM_ENDS, Traffic
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.process import traffic_files
from sluice_server.services.process.traffic_files import prefix_of, read, write

TRAFFIC = Traffic(64, 4096, 100, 20_000, tuple(range(NUM_ENDS)), 0.25, 7, 8, 9, 1e-3)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "folder" / "abc")


def test_what_engines_write_is_read_the_newest_first(prefix: str) -> None:
    assert read(prefix) == []
    write(prefix, "engine-0", TRAFFIC)
    other = dataclasses.replace(TRAFFIC, block_size=16)
    write(prefix, "engine-1", other)
    assert read(prefix) == [other, TRAFFIC]
    write(prefix, "engine-0", TRAFFIC)
    assert read(prefix) == [TRAFFIC, other]
    assert read(prefix + "d") == []
    assert len(list(Path(prefix).parent.iterdir())) == 2  # no part is left


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"block_size":32,"num_requests":1e999}',
        b'{"block_size":33}',
        b'{"block_size":32,"ends":[1,2]}',
        b'{"block_size":32,"num_tokens":-1}',
        b'{"block_size":32,"unused":1.5}',
        b'{"block_size":32,"token_s":-1}',
        b" " * (1 << 17),
    ],
)
def test_a_file_that_is_no_traffic_counts_for_nothing(prefix: str, text: bytes) -> None:
    write(prefix, "engine-0", TRAFFIC)
    (path,) = Path(prefix).parent.iterdir()
    path.write_bytes(text)
    write(prefix, "engine-1", TRAFFIC)
    assert read(prefix) == [TRAFFIC]


def test_the_oldest_files_go(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_files, "MAX_FILES", 3)
    for at in range(6):
        write(prefix, f"engine-{at}", dataclasses.replace(TRAFFIC, num_requests=at))
    assert sorted(one.num_requests for one in read(prefix)) == [3, 4, 5]


def test_models_and_formats_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered.cache_clear()
    engine = EngineConfig()
    prefixes = {
        prefix_of(engine, "/a", "main"),
        prefix_of(engine, "/b", "main"),
        prefix_of(engine, "/a", "other"),
        prefix_of(dataclasses.replace(engine, kv_cache_dtype="int8"), "/a", "main"),
    }
    assert len(prefixes) == 4 and all(Path(one).is_relative_to(tmp_path / "sluice/traffic") for one in prefixes)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    remembered.cache_clear()
    assert prefix_of(engine, "/a", "main") == ""
    remembered.cache_clear()
