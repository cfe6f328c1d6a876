"""Caches that are resized: blocks go offline, move below the limit and come back; host slots likewise."""

import ctypes
import mmap

import pytest
import torch

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.pool import BlockPool, EvictionClass
from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.kv_cache.resizing import evacuate, num_outside, set_limit
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.kernels.cpu import memory

SIZE = 4
ROOT = tenant_root(b"", "acme")


def table_of(cache: KVCache, tokens: list[int]) -> BlockTable:
    """A table whose full blocks are named."""
    table = BlockTable(ROOT, groups=[[] for _ in range(cache.num_groups)], trimmed=[0] * cache.num_groups)
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def test_free_blocks_go_offline_at_once_and_held_ones_when_they_are_released() -> None:
    pool = BlockPool(6)
    held = [pool.allocate() for _ in range(6)]
    pool.release(held[5])
    assert pool.resize(3) == [5]
    assert (pool.num_blocks, pool.num_free, pool.num_offline, pool.num_held) == (3, 0, 1, 5)
    assert pool.outside(9) == [4, 3] and pool.outside(1) == [4]
    pool.check()
    pool.release(held[4])
    pool.release(held[0])
    assert pool.is_offline(4) and not pool.is_offline(0) and pool.num_free == 1
    pool.check()
    assert pool.resize(6) == [] and pool.num_free == 3 and pool.outside(9) == []
    pool.check()
    assert sorted(pool.allocate() for _ in range(3)) == [0, 4, 5]


def test_a_pool_begins_smaller_than_it_may_become() -> None:
    pool = BlockPool(2, 5)
    assert (pool.num_blocks, pool.size, pool.num_free, pool.null) == (2, 5, 2, 5)
    pool.check()
    pool.resize(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="a pool of 6 of 5 blocks"):
        BlockPool(6, 5)


@pytest.mark.parametrize("windows", [(None,), (None, Window(8, 4))])
def test_held_blocks_move_with_their_names_and_their_sharers(windows: tuple[Window | None, ...]) -> None:
    cache = KVCache(8 * len(windows), SIZE, True, windows=windows)
    unused = table_of(cache, [9] * (4 * SIZE))
    tokens = list(range(3 * SIZE + 2))
    table = table_of(cache, tokens)
    child = cache.fork(table, 3 * SIZE)
    before = [list(own) for own in table.groups]
    cache.release(unused)
    set_limit(cache, 5 * len(windows))
    left = num_outside(cache)
    assert left > 0
    moved = evacuate(cache, [table, child], 1)
    assert len(moved) == 1 and num_outside(cache) == left - 1
    moved |= evacuate(cache, [table, child], 100)
    assert num_outside(cache) == 0
    assert [[moved.get(block, block) for block in own] for own in before] == table.groups
    assert [own[:3] for own in table.groups] == child.groups
    cache.check([table, child])
    copies = {move.source: move.target for move in cache.take_moves() if move.kind is MoveKind.COPY}
    assert copies == moved
    found = cache.match(BlockTable(ROOT), [*tokens, 0])  # by the names, which moved too
    assert found.num == 3 and all(own[1:] == table.groups[at][1:3] for at, own in enumerate(found.groups))
    cache.release(child)
    cache.release(table)
    cache.check([])


def test_no_block_moves_without_a_free_one_and_the_cached_go_first() -> None:
    cache = KVCache(4, SIZE, True)
    table = table_of(cache, list(range(4 * SIZE)))
    set_limit(cache, 2)
    assert evacuate(cache, [table], 10) == {} and num_outside(cache) == 2
    cache.release(table)
    assert num_outside(cache) == 0 and cache.pool.num_free == 2 and len(cache.index) == 2
    cache.check([])


def test_what_goes_offline_is_saved_in_host_memory() -> None:
    cache = KVCache(4, SIZE, True, Tiers(4, 0))
    cache.release(table_of(cache, list(range(4 * SIZE))))
    set_limit(cache, 1)
    saved = [move.source for move in cache.take_moves() if move.kind is MoveKind.SAVE]
    assert len(saved) == 3 and cache.tiers is not None and cache.tiers.num_host == 3


def test_host_slots_that_go_are_written_and_those_being_read_into_are_given_up() -> None:
    tiers = Tiers(3, 9, (b"old",))
    tiers.save(b"a", 0)
    tiers.save(b"b", 1)
    reading = tiers.read(b"old")
    assert reading is not None and reading[-1].target == 2
    assert tiers.resize(1) == [Move(MoveKind.WRITE, 1, name=b"b")]
    tiers.check()
    assert tiers.num_host == 1 and tiers.touch(b"a") and not tiers.touch(b"b")
    tiers.ended(reading[-1], is_good=True)
    assert not tiers.touch(b"old") and tiers.read(b"old") is not None  # it is on disk still
    tiers.check()
    assert tiers.resize(3) == [] and tiers.num_slots == 3
    tiers.check()
    assert tiers.resize(0) == [] and tiers.save(b"c", 0) == []


def test_a_slot_that_is_read_into_comes_back_when_its_read_ends() -> None:
    tiers = Tiers(2, 9, (b"x", b"y"))
    for name in (b"x", b"y"):
        assert tiers.read(name) is not None
    tiers.resize(0)
    tiers.resize(2)
    tiers.check()
    for name, slot in ((b"x", 0), (b"y", 1)):
        tiers.ended(Move(MoveKind.READ, target=slot, name=name), is_good=True)
    tiers.check()
    assert tiers.num_host == 2


def resident_bytes(address: int, size: int) -> int:
    """Bytes of a range that the system backs."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_memory_is_given_back_to_the_system_and_nothing_else_is_touched() -> None:
    layers = [memory.zeros(64 << 18, torch.float32).view(64, 1 << 18 >> 4, 2, 1, 8) for _ in range(2)]
    store = BlockStore(layers)
    for layer in layers:
        layer.fill_(7.0)
    each = layers[0][0].numel() * 4
    given = store.give_back(16, 64)
    assert given == 2 * 48 * each
    for layer in layers:
        assert resident_bytes(layer[16:].data_ptr(), 48 * each) <= 2 << 20
        assert float(layer[:16].min()) == 7.0 and float(layer[16:].max()) == 0.0


def test_only_whole_pages_are_given_back() -> None:
    tensor = torch.full((3, 1000), 7.0)
    size = tensor[1:2].numel() * 4
    assert memory.give_back(tensor[1:2]) in (0, size // mmap.PAGESIZE * mmap.PAGESIZE)
    assert float(tensor[0].min()) == float(tensor[2].min()) == 7.0


def test_the_least_worth_of_what_is_left_is_still_taken_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    pool.release(blocks[1], EvictionClass.LONG)
    pool.release(blocks[0], EvictionClass.NOT)
    pool.resize(3)
    pool.resize(4)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
