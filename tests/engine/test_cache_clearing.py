"""An engine whose cache is cleared of a tenant: on all tiers nothing of it is left, and tokens do not change."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.prefix import is_of, owner_of, tenant_root
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.engine.cache_operations import CacheClearing
from sluice_server.services.messages.control import CacheCleared, ClearCache
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=8,
    threads=1,
    max_num_seqs=8,
    kv_cache_tokens=256,
    shared_cache_bytes=1 << 18,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape())


def built(checkpoint: Path, directory: Path, **changes: object) -> BuiltEngine:
    tiers = {"host_cache_bytes": 1 << 17, "disk_cache_bytes": 1 << 24, "disk_cache_dir": str(directory)}
    asked = dataclasses.replace(CONFIG, **(tiers | changes))  # type: ignore[arg-type] # any field
    model = read_config(checkpoint)
    limits = limits_of(asked, model, 1 << 20)
    return build_engine(asked, model, checkpoint, limits, digests=lambda: Digests(b"weights"))


def begin(made: BuiltEngine, name: str, tenant: str, num_prompt: int = 60, num: int = 12) -> None:
    params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    prompt = tuple(3 + (ord(name[0]) * 7 + at * at) % 50 for at in range(num_prompt))
    salt = tenant_root(made.engine.identity.encoded(), tenant)
    made.engine.add(EngineRequest(name, prompt, params, tenant=tenant, cache_salt=salt))


def finish(made: BuiltEngine) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens and numbers of cached tokens of what is open."""
    out, cached = dict[str, list[int]](), dict[str, int]()
    while made.engine.has_work:
        for one in made.engine.step().sampled:
            out.setdefault(one.request_id, []).extend(one.token_ids)
            if one.admission is not None:
                cached[one.request_id] = one.admission.num_cached
        made.engine.scheduler.check()
    return out, cached


def write_behind(made: BuiltEngine) -> None:
    """Until all that is cached is on disk."""
    cache = made.engine.scheduler.cache
    assert cache.tiers is not None
    while made.engine.idle() or cache.tiers.num_behind:
        time.sleep(0)


async def clear(made: BuiltEngine, tenant: str | None) -> CacheCleared:
    assert made.store is not None
    answers = [one async for one in CacheClearing(made.engine, made.store.block_bytes).clear(ClearCache(tenant))]
    last = answers[-1]
    assert isinstance(last, CacheCleared) and last.is_complete
    return last


def bytes_left(made: BuiltEngine) -> int:
    """Device blocks, host slots and shared slots that are not zero."""
    assert made.store is not None and made.shared is not None
    device = sum(any(bool(layer[block].any()) for layer in made.store.cache) for block in range(32))
    host = sum(any(bool(layer[slot].any()) for layer in made.store._host) for slot in range(made.store.num_host))
    shared = bytes(made.shared._memory[-made.shared.num_slots * made.store.block_bytes :])
    return device + host + len(shared.replace(b"\0", b""))


def test_nothing_of_a_tenant_is_left_on_any_tier(checkpoint: Path, tmp_path: Path) -> None:
    made = built(checkpoint, tmp_path)
    for name, tenant in (("a1", "acme"), ("b1", "other"), ("c1", "acme")):
        begin(made, name, tenant)
        finish(made)
    write_behind(made)
    before = {path.name for path in tmp_path.glob("*.kv")}
    assert any(is_of(bytes.fromhex(name[:64]), owner_of("acme")) for name in before)
    cleared = asyncio.run(clear(made, "acme"))
    left = {bytes.fromhex(path.stem) for path in tmp_path.glob("*.kv")}
    assert left and not [name for name in left if is_of(name, owner_of("acme"))] and cleared.num_in_use == 0
    assert cleared.num_blocks >= len(before) - len(left)
    for name, tenant, hits in (("a1", "acme", 0), ("b1", "other", 56)):
        begin(made, name, tenant)
        assert finish(made)[1] == {name: hits}
    asyncio.run(clear(made, None))
    assert bytes_left(made) == 0 and not list(tmp_path.glob("*.kv")) and len(made.engine.scheduler.cache.index) == 0
    made.close()
    assert not list(tmp_path.glob("*.kv")), "nothing comes back when it ends"


def test_open_requests_go_on_and_share_nothing_afterwards(checkpoint: Path, tmp_path: Path) -> None:
    plain = built(checkpoint, tmp_path / "plain")
    for name in ("a1", "b1"):
        begin(plain, name, "acme", num=30)
    want, _ = finish(plain)
    plain.close()
    made = built(checkpoint, tmp_path)
    for name in ("a1", "b1"):
        begin(made, name, "acme", num=30)
    for _ in range(6):
        made.engine.step()
    first = {name: list(ids) for name, ids in want.items()}
    cleared = asyncio.run(clear(made, "acme"))
    assert cleared.num_in_use >= 2
    rest, _ = finish(made)
    assert all(first[name][-len(ids) :] == ids for name, ids in rest.items())
    assert len(made.engine.scheduler.cache.index) == 0, "what they computed afterwards has no name"
    while made.engine.idle():
        pass
    assert bytes_left(made) == 0 and not made.engine.scheduler.cache.unwiped
    made.close()


def test_a_block_is_wiped_before_it_is_used_again(checkpoint: Path, tmp_path: Path) -> None:
    made = built(checkpoint, tmp_path, kv_cache_tokens=72)  # no other block is free
    begin(made, "a1", "acme")
    finish(made)
    made.engine.clear_cache("acme")
    begin(made, "b1", "other", num_prompt=9, num=2)
    made.engine.step()
    assert made.store is not None
    (table,) = made.engine.scheduler.tables_of("other")
    tail = [layer[table.blocks[1]] for layer in made.store._all]
    assert sum(int((one != 0).any(-1).sum()) for one in tail) < sum(one.numel() // one.shape[-1] for one in tail) / 2
    finish(made)
    made.close()


def test_the_store_of_the_host_is_cleared_as_well(checkpoint: Path, tmp_path: Path) -> None:
    made, told, held_off = built(checkpoint, tmp_path), list[bytes](), list[bytes]()
    assert made.store is not None

    @contextlib.contextmanager
    def hold_off(owner: bytes) -> Iterator[None]:
        begin(made, "a1", "acme", num=1)
        finish(made)
        held_off.append(owner)
        try:
            yield
        finally:
            held_off.remove(owner)

    async def clear_with(tenant: str | None, *, is_done: bool) -> None:
        def clear_store(owner: bytes) -> bool:
            assert held_off == [owner] and not made.engine.scheduler.cache.index.named(owner)
            told.append(owner)
            return is_done

        sizes = made.store.block_bytes  # type: ignore[union-attr] # is there
        operation = CacheClearing(made.engine, sizes, clear_store, hold_off)
        assert [one async for one in operation.clear(ClearCache(tenant))]

    asyncio.run(clear_with("acme", is_done=True))
    with pytest.raises(ServiceError, match="the store of this host was not reached"):
        asyncio.run(clear_with(None, is_done=False))
    assert told == [owner_of("acme"), b""] and not held_off
    made.close()


def test_two_engines_share_one_directory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_server.engine.kv_cache.disk_upkeep.LOOK_S", 0.0)
    one, other = built(checkpoint, tmp_path), built(checkpoint, tmp_path)
    begin(one, "a1", "acme")
    want, _ = finish(one)
    write_behind(one)
    other_tiers = other.engine.scheduler.cache.tiers
    assert other_tiers is not None and one.store is not None
    for _ in range(10_000):
        other.engine.idle()
        if other_tiers.num_disk == len(list(tmp_path.glob("*.kv"))):
            break
    begin(other, "a1", "acme")
    assert finish(other) == (want, {"a1": 56})
    asyncio.run(clear(one, "acme"))
    asyncio.run(clear(other, "acme"))
    assert not list(tmp_path.glob("*.kv")) and other_tiers.num_disk == 0
    one.close()
    other.close()
