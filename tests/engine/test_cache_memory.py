"""An engine whose cache is resized while it computes: tokens do not change, and memory follows."""

import concurrent.futures
import dataclasses
import random
import threading
from pathlib import Path

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.identity import Digests
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=8, threads=1, max_num_seqs=8, kv_cache_tokens=512, kv_cache_max_tokens=768
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape())


def built(checkpoint: Path, **changes: object) -> tuple[BuiltEngine, CacheMemory]:
    asked = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type] # any field
    model = read_config(checkpoint)
    limits = limits_of(asked, model, 1 << 20)
    made = build_engine(asked, model, checkpoint, limits, digests=lambda: Digests(b"weights"))
    assert made.memory is not None
    return made, made.memory


def request(name: str, length: int, num: int) -> EngineRequest:
    rng = random.Random(name)
    params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tuple(rng.randrange(3, 60) for _ in range(length)), params)


def tokens_of(made: BuiltEngine, memory: CacheMemory | None, rng: random.Random) -> dict[str, list[int]]:
    """The greedy tokens of 16 requests; between steps the cache of `memory` is resized at random."""
    engine = made.engine
    for at in range(16):
        engine.add(request(f"r{at}", 5 + 3 * at % 40, 12 + at % 7))
    out: dict[str, list[int]] = {}
    while engine.has_work:
        if memory is not None and rng.random() < 0.3:
            try:
                memory.resize(rng.randrange(8, 97) * 8)
            except ServiceError as error:
                assert error.reason == "CACHE_IN_USE"
        if memory is not None and not memory.advance(rng.choice((1, 4))):
            memory.give_back()
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            out.setdefault(event.request_id, []).extend(event.token_ids)
        engine.scheduler.check()
    return out


@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_tokens_are_those_of_a_cache_that_is_not_resized(checkpoint: Path, speculation: str) -> None:
    made, _ = built(checkpoint, speculation=speculation)
    plain = tokens_of(made, None, random.Random(0))
    made.close()
    for host_bytes in (0, 1 << 16):
        again, memory = built(checkpoint, speculation=speculation, host_cache_bytes=host_bytes)
        rng = random.Random(host_bytes)
        assert tokens_of(again, memory, rng) == plain
        assert again.engine.scheduler.cache.pool.num_held == 0
        again.close()


def test_sizes_out_of_range_are_refused_and_change_nothing(checkpoint: Path) -> None:
    made, memory = built(checkpoint, host_cache_bytes=1 << 16)
    assert (memory.tokens, memory.max_tokens) == (512, 768) and memory.host_bytes > 0
    host = memory.host_bytes
    for tokens, host_bytes, field in ((7, None, "tokens"), (769, None, "tokens"), (None, host + 1, "host_bytes")):
        with pytest.raises(ServiceError) as caught:
            memory.resize(tokens, host_bytes)
        assert (caught.value.reason, caught.value.field) == ("INVALID_PARAMETER", field)
    made.engine.add(request("a", 30, 40))
    made.engine.step()
    with pytest.raises(ServiceError) as caught:
        memory.resize(64)
    assert caught.value.reason == "CACHE_IN_USE" and caught.value.details == {"actual": "9", "limit": "8"}
    assert (memory.tokens, memory.host_bytes) == (512, host)
    memory.resize(72, 0)
    assert (memory.tokens, memory.host_bytes) == (72, 0)
    with pytest.raises(ServiceError) as caught:
        made.engine.add(request("b", 60, 20))
    assert caught.value.reason == "KV_CAPACITY"
    memory.resize(768, host)
    made.engine.add(request("b", 60, 20))
    made.close()


def test_memory_that_was_in_use_is_given_back(checkpoint: Path) -> None:
    made, memory = built(checkpoint, kv_cache_tokens=1 << 17, kv_cache_max_tokens=0)
    store = memory.store
    for layer in store.cache:
        layer.fill_(1.0)
    memory.resize(1 << 14)
    assert memory.advance(100) == 0
    given, expected = memory.give_back(), (1 << 17) * 7 // 8 // 8 * store.block_bytes
    assert 0.95 * expected <= given <= expected
    assert memory.give_back() == 0
    assert float(store.cache[0][1 << 13].max()) == 0.0 and float(store.cache[0][0].min()) == 1.0
    made.close()


def test_a_resize_waits_while_memory_is_given_back(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, memory = built(checkpoint)
    memory.resize(64)
    begun, ended, order = threading.Event(), threading.Event(), list[str]()

    def give_back(first: int, end: int) -> int:
        begun.set()
        assert ended.wait(20)
        order.append("given back")
        return 0

    monkeypatch.setattr(memory.store, "give_back", give_back)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        giving = threads.submit(memory.give_back)
        assert begun.wait(20)
        resizing = threads.submit(memory.resize, 512)
        resizing.add_done_callback(lambda done: order.append("resized"))
        threading.Timer(0.05, ended.set).start()
        giving.result(), resizing.result()
    assert order == ["given back", "resized"] and memory.tokens == 512
    made.close()


def test_an_idle_engine_writes_its_cache_behind(checkpoint: Path, tmp_path: Path) -> None:
    sizes = {"host_cache_bytes": 1 << 18, "disk_cache_bytes": 1 << 24, "disk_cache_dir": str(tmp_path)}
    made, memory = built(checkpoint, **sizes)
    engine = made.engine
    engine.add(request("a", 40, 9))
    while engine.has_work:
        assert not engine.step().failed
    num_named = len(engine.scheduler.cache.index)
    assert num_named == 6
    while engine.idle():
        pass
    memory.store.close()  # as far as the disk has come; nothing is saved
    assert len(list(tmp_path.glob("*.kv"))) == num_named
    again, _ = built(checkpoint, **sizes)
    again.engine.add(request("a", 40, 9))
    cached = []
    while again.engine.has_work:
        cached += [one.admission.num_cached for one in again.engine.step().sampled if one.admission is not None]
    assert cached == [32]  # five blocks but for the one of the last token
    again.close()
