"""Cache blocks of one identity are never used for another, on a disk that several engines have used in turn."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.prefix import root
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.identity import Digests
from tests.oracle.checkpoints import Shape, make_checkpoint

SHAPE = Shape(hidden=64, intermediate=96)
BLOCK = 8
BLOCK_BYTES = 2 * BLOCK * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
PROMPT = tuple((5 * i) % 100 + 3 for i in range(5 * BLOCK + 3))
V1, V2 = Digests(b"v1"), Digests(b"v2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


def make(checkpoint: Path, disk: Path, digests: Digests = V1, **settings: Any) -> Engine:  # noqa: ANN401 # mixed
    config = EngineConfig(
        device="cpu",
        **{"dtype": "float32", "kv_cache_dtype": "float32", **settings},
        block_size=BLOCK,
        kv_cache_tokens=8 * BLOCK,
        threads=1,
        host_cache_bytes=12 * BLOCK_BYTES,
        disk_cache_bytes=200 * BLOCK_BYTES,
        disk_cache_dir=str(disk),
    )
    model = read_config(checkpoint)
    limits, draft = limits_of(config, model, 1 << 20), checkpoint if config.draft_model else None
    return build_engine(config, model, checkpoint, limits, draft, digests=lambda: digests).engine


def ask(engine: Engine, prompt: tuple[int, ...], *, bypasses_cache: bool = False) -> tuple[int, tuple[int, ...]]:
    """The number of cached tokens, and the answer."""
    salt, params = root(engine.identity), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(EngineRequest("0" * 32, prompt, params, cache_salt=salt, bypasses_cache=bypasses_cache))
    cached, ids = 0, list[int]()
    while engine.has_work:
        for event in engine.step().sampled:
            cached += event.admission.num_cached if event.admission is not None else 0
            ids += event.token_ids
    return cached, tuple(ids)


def leave_on_disk(engine: Engine) -> None:
    """Pushes the blocks of the prompt out of device and host, and waits for their files."""
    books = engine.scheduler.cache.tiers
    assert books is not None
    ask(engine, PROMPT)
    for first in range(4, 10):
        ask(engine, (first, *PROMPT[1:]))
    while books.stats.num_written < 5:
        os.sched_yield()
        for move, is_good in engine.runner.moved():
            books.ended(move, is_good)


OTHERS = {
    "weights": (V2, {}),
    "int4": (V1, {"quantization": "int4"}),
    "int8": (V1, {"quantization": "int8"}),
    "bfloat16": (V1, {"dtype": "bfloat16"}),
    "cache in bfloat16": (V1, {"kv_cache_dtype": "bfloat16"}),
    "cache in int8": (V1, {"kv_cache_dtype": "int8"}),
    "draft": (Digests(b"v1", b"d1"), {"speculation": "draft", "draft_model": "x"}),
}


def test_no_other_engine_finds_the_blocks_of_one(checkpoint: Path, tmp_path: Path) -> None:
    leave_on_disk(make(checkpoint, tmp_path))
    for name, (digests, settings) in OTHERS.items():
        other = make(checkpoint, tmp_path, digests, **settings)
        cached, ids = ask(other, PROMPT)
        assert cached == 0, name
        assert ids == ask(other, PROMPT, bypasses_cache=True)[1], name
    cached, ids = ask(again := make(checkpoint, tmp_path), PROMPT)
    assert cached == 5 * BLOCK and ids == ask(again, PROMPT, bypasses_cache=True)[1]


def test_drafts_of_two_models_are_two_identities(checkpoint: Path, tmp_path: Path) -> None:
    drafting = {"speculation": "draft", "draft_model": "x"}
    made = [make(checkpoint, tmp_path, Digests(b"v1", name), **drafting).identity for name in (b"d1", b"d2", b"d1")]
    assert made[0] == made[2] != made[1]


def test_nothing_is_kept_on_disk_without_a_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="named by the content"):
        make(checkpoint, tmp_path, Digests())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheIdentity)])
def test_every_field_counts(field: str) -> None:
    some = CacheIdentity(b"w", b"d", "int8", "float32", "bfloat16", "k")
    value: bytes | str = b"other" if field in ("weights", "draft") else "other"
    other = dataclasses.replace(some, **{field: value})  # type: ignore[arg-type] # of the field's type
    assert other.encoded() != some.encoded() and root(other, b"") != root(some, b"")
