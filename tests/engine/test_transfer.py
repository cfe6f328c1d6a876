"""A request that continues at another engine, whose cache gets the blocks of the first: equal tokens, none computed."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from sluice_server.engine import build
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.prefix import owner_of, tenant_root
from sluice_server.engine.kv_cache.shared_slots import ReadSlots
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.transfer import BlockFetcher
from sluice_server.services.transfer.store_link import SeveralSources
from tests.engine.test_engine_oracle import GEMMA2, GPT_OSS, SHARED, named
from tests.oracle.checkpoints import Shape, make_checkpoint

SHAPES = {
    "llama": Shape("llama"),
    "mistral-window": Shape("mistral", options=(("sliding_window", 10),)),
    "qwen2-experts": Shape("qwen2_moe", options=SHARED),
    "gpt-oss": Shape("gpt_oss", head_dim=32, options=GPT_OSS),
    "gemma2": Shape("gemma2", tied=True, options=GEMMA2),
}
CASES = [*((name, "float32") for name in SHAPES), ("llama", "bfloat16"), ("gemma2", "int8")]
CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=8, kv_cache_tokens=2048, threads=1, shared_cache_bytes=1 << 22
)
NUM, FIRST = 24, 3  # tokens of an output, and those that the first engine samples


class Lossy:
    """Another engine's memory, of which `loses` says what does not come."""

    def __init__(self, memory: ReadSlots, loses: Callable[[int], bool]) -> None:
        self._memory = memory
        self._loses = loses
        self.num = 0

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """All that is offered; what is lost is seen when it is read."""

        def reading(name: bytes) -> Callable[[], bytes | None]:
            place = found[name]
            self.num += 1
            return (lambda: None) if self._loses(self.num - 1) else lambda: self._memory.read(place)

        found = self._memory.find(names)
        return {name: reading(name) for name in found}

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Does nothing: memory is there."""

    def release(self, names: Sequence[bytes]) -> None:
        """Does nothing: these blocks are not awaited."""

    def clear(self, owner: bytes) -> bool:
        """Nothing is kept."""
        return True

    def take_released(self) -> Sequence[bytes]:
        """None."""
        return ()


def make(directory: Path, **settings: object) -> BuiltEngine:
    config = dataclasses.replace(CONFIG, **settings)  # type: ignore[arg-type] # mixed values
    model = read_config(directory)
    return build.build_engine(config, model, directory, limits_of(config, model, 1 << 20), digests=named)


def finish(engine: Engine, request: EngineRequest, num: int = 1 << 20) -> tuple[list[int], int]:
    """The tokens of a request, until it has so many, and how many of its tokens were cached."""
    engine.add(request)
    ids: list[int] = []
    cached = 0
    while engine.has_work and len(ids) < num:
        for event in engine.step().sampled:
            ids += event.token_ids
            cached = event.admission.num_cached if event.admission is not None else cached
        engine.scheduler.check()
    engine.cancel(request.request_id)
    return ids, cached


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("name", "cache_dtype"), CASES)
def test_tokens_are_equal_and_full_blocks_are_cached(
    tmp_path: Path, name: str, cache_dtype: str, temperature: float
) -> None:
    shape = SHAPES[name]
    make_checkpoint(tmp_path, shape)
    rng = random.Random(4)
    prompt = tuple(rng.randrange(shape.vocab) for _ in range(203))
    params = SamplingParams(max_tokens=NUM, temperature=temperature, seed=5, ignore_eos=True)
    asked = EngineRequest("a" * 32, prompt, params, cache_salt=b"t")
    alone, _ = finish(make(tmp_path, kv_cache_dtype=cache_dtype, shared_cache_bytes=0).engine, asked)
    first = make(tmp_path, kv_cache_dtype=cache_dtype)
    assert first.shared is not None and first.store is not None
    told, _ = finish(first.engine, asked, FIRST)
    memory = ReadSlots(first.shared.file, first.store.block_bytes, first.store.layout)
    first.close()  # its owner's end does not matter
    for loses in (lambda i: False, lambda i: i >= 12, lambda i: True):
        second = make(tmp_path, kv_cache_dtype=cache_dtype)
        assert second.store is not None
        source = Lossy(memory, loses)
        ticks = iter(range(1 << 20))
        fetcher = BlockFetcher(second.engine, source, second.store.fill, lambda it=ticks: next(it) * 1e-9)  # type: ignore[misc] # of lambdas
        again = dataclasses.replace(asked, resume_ids=(tuple(told[:FIRST]),))
        fetcher.fetch(again)
        rest, cached = finish(second.engine, again)
        assert told[:FIRST] + rest == alone
        full = (len(prompt) + FIRST - 1) // 8 * 8
        if not loses(12):
            assert cached >= 0.95 * full, (cached, full)
        elif loses(0):
            assert cached == 0 and fetcher.num_missed
        else:
            assert cached < full
        second.close()


class Store(Lossy):
    """The memory as the store of the host, a level of the tiers: some of what it holds does not come."""

    def holds(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """All that is offered."""
        return list(self._memory.find(names))

    def blocks(self, names: Sequence[bytes], end_s: float) -> Iterator[bytes | None]:
        """Reads one after the other."""
        for name in names:
            yield self.find([name], end_s)[name]()


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_the_store_is_a_level_below_the_host_memory(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    make_checkpoint(tmp_path, shape)
    rng = random.Random(4)
    prompt = tuple(rng.randrange(shape.vocab) for _ in range(203))
    params = SamplingParams(max_tokens=NUM, temperature=0.9, seed=5, ignore_eos=True)
    asked = EngineRequest("a" * 32, prompt, params, cache_salt=b"t")
    first = make(tmp_path)
    assert first.shared is not None and first.store is not None
    alone, _ = finish(first.engine, asked)
    memory = ReadSlots(first.shared.file, first.store.block_bytes, first.store.layout)
    first.close()
    for loses, least in ((lambda i: False, 200), (lambda i: i >= 12, 96), (lambda i: True, 0)):
        second = make(tmp_path, host_cache_bytes=1 << 20)
        assert second.store is not None and (tiers := second.engine.scheduler.cache.tiers) is not None
        store = Store(memory, loses)
        fetcher = BlockFetcher(second.engine, SeveralSources([]), second.store.fill, time.monotonic, store)
        second.store.fetch_from(store, lambda num: 60.0)
        fetcher.fetch(asked)
        assert second.engine.scheduler.cache.num_free == second.engine.scheduler.cache.num_blocks, "nothing is held"
        ids, cached = finish(second.engine, asked)
        assert (ids, cached) == (alone, least)
        assert tiers.stats.num_fetched == least // 8 and (tiers.stats.num_missed > 0) is (least < 200)
        second.close()


def test_nothing_waits_longer_than_computing_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    first, second = make(tmp_path), make(tmp_path)
    assert first.shared is not None and first.store is not None and second.store is not None
    asked = EngineRequest("a" * 32, tuple(range(90)), SamplingParams(max_tokens=2), cache_salt=b"t")
    finish(first.engine, asked)
    memory = ReadSlots(first.shared.file, first.store.block_bytes, first.store.layout)
    seconds = iter(0.1 * i for i in range(100))
    fetcher = BlockFetcher(second.engine, Lossy(memory, lambda i: False), second.store.fill, lambda: next(seconds))
    fetcher.fetch(asked)
    assert fetcher.num_fetched == 2  # of the 0.25 s, each takes 0.1
    second.engine.scheduler.check()


def test_what_is_being_cleared_is_not_fetched(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    first, second = make(tmp_path), make(tmp_path)
    assert first.shared is not None and first.store is not None and second.store is not None
    salt = tenant_root(first.engine.identity.encoded(), "t")
    asked = EngineRequest("a" * 32, tuple(range(90)), SamplingParams(max_tokens=2), cache_salt=salt)
    finish(first.engine, asked)
    memory = ReadSlots(first.shared.file, first.store.block_bytes, first.store.layout)
    fetcher = BlockFetcher(second.engine, Lossy(memory, lambda i: False), second.store.fill, lambda: 0.0)
    for owner in (b"", owner_of("t")):
        with fetcher.hold_off(owner):
            fetcher.fetch(asked)
        assert not fetcher.num_fetched
    with fetcher.hold_off(owner_of("other")):
        fetcher.fetch(asked)
    assert fetcher.num_fetched == 11


def test_memory_of_another_layout_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    one, other = make(tmp_path), make(tmp_path, kv_cache_dtype="bfloat16")
    assert one.shared is not None and other.store is not None
    with pytest.raises(ValueError, match="another model, format or layout"):
        ReadSlots(one.shared.file, other.store.block_bytes, other.store.layout)
    with pytest.raises(ServiceError, match="less than one cache block"):
        make(tmp_path, shared_cache_bytes=5)


def test_what_is_half_written_or_overwritten_is_not_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    one = make(tmp_path)
    assert one.shared is not None and one.store is not None
    memory = ReadSlots(one.shared.file, one.store.block_bytes, one.store.layout)
    name, data = b"n" * 32, bytes(one.store.block_bytes)
    one.shared.write(3, name, data)
    place = memory.find([name])[name]
    assert memory.read(place) == data
    one.shared._memory[-1 - one.store.block_bytes * (one.shared.num_slots - 4)] = 1  # a bit of it
    assert memory.read(place) is None
    one.shared.write(3, name, data)
    one.shared._open(3)  # its owner ends while it writes
    assert memory.read(place) is None
    one.shared.write(3, b"o" * 32, data)
    assert memory.read(place) is None


def test_time_is_passed_to_offers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    engine = make(tmp_path, shared_cache_bytes=1 << 14).engine
    offers = engine.scheduler.cache.offers
    assert offers is not None
    before_s = time.monotonic()
    finish(engine, EngineRequest("a" * 32, tuple(range(90)), SamplingParams(max_tokens=2), cache_salt=b"t"))
    assert offers._now_s >= before_s
    assert offers.num_offered == offers.num_slots and offers.num_refused == 11 - offers.num_slots
