"""The prefix cache is saved when a process ends, and found by the next."""

import itertools
import logging
from pathlib import Path

import pytest
import torch

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.prefix import tenant_root
from sluice_server.engine.kv_cache.saving import save_cache
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers
from tests.engine.kv_cache.test_block_store import names_on_disk

ROOT = tenant_root(b"", "acme")
SIZE, BLOCKS = 4, 12
PROMPT = list(range(5 * SIZE + 1))


def made(directory: Path, num_disk: int = 8) -> tuple[KVCache, BlockStore]:
    """A cache, and a store of it with random contents."""
    torch.manual_seed(0)
    store = BlockStore([torch.randn(BLOCKS + 1, SIZE, 2, 1, 16)], 2, directory)
    return KVCache(BLOCKS, SIZE, True, Tiers(2, num_disk, names_on_disk(directory))), store


def filled(cache: KVCache, tokens: list[int]) -> BlockTable:
    """A table whose full blocks are named."""
    table = BlockTable(ROOT)
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def test_the_next_process_finds_what_the_last_one_held(tmp_path: Path) -> None:
    cache, store = made(tmp_path)
    table = filled(cache, PROMPT)
    contents = [store.cache[0][block].clone() for block in table.blocks[:5]]
    cache.release(table)
    filled(cache, [100, *PROMPT[1 : 2 * SIZE]])  # held by a request that has not ended
    assert save_cache(cache, store, 60.0) == 7
    again, other = made(tmp_path)
    table = BlockTable(ROOT)
    while again.is_awaited(table, PROMPT) or again.match(table, PROMPT).num < 2:  # as many as host memory holds
        other.move(again.take_moves())
        for move, is_good in other.moved():
            assert is_good
            again.moved(move, is_good)
    other.move(again.take_moves())
    found = again.match(table, PROMPT).groups[0]
    for block, want in zip(found, contents, strict=False):
        assert torch.equal(other.cache[0][block], want)
    other.close()


def test_the_most_recent_is_saved_first_and_is_the_last_to_go(tmp_path: Path) -> None:
    cache, store = made(tmp_path)
    table = filled(cache, PROMPT)
    names = table.names[:5]
    cache.release(table)
    ticks = itertools.count()
    assert save_cache(cache, store, 4.0, lambda: float(next(ticks))) == 3
    assert names_on_disk(tmp_path) == tuple(reversed(names[:3]))  # a block without those before it is of no use


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "removed"
    directory.mkdir()
    cache, store = made(directory)
    directory.rmdir()
    cache.release(filled(cache, PROMPT))
    with caplog.at_level(logging.WARNING):
        assert save_cache(cache, store, 60.0) == 0
    assert [record.message[:27] for record in caplog.records] == ["cache blocks are not saved:"]


def test_nothing_is_saved_where_it_is_off(tmp_path: Path) -> None:
    older = [bytes([number]) * 32 for number in range(8)]
    for one in older:
        (tmp_path / f"{one.hex()}.kv").write_bytes(b"of an earlier process")
    cache, store = made(tmp_path)
    cache.release(filled(cache, PROMPT))
    assert save_cache(cache, store, 0.0) == 0
    assert sorted(names_on_disk(tmp_path)) == older, "nothing leaves the disk for what is not written"
    bare = BlockStore([torch.randn(BLOCKS + 1, SIZE, 2, 1, 16)])
    assert save_cache(KVCache(BLOCKS, SIZE, True), bare, 60.0) == 0


def test_removals_come_before_writes_and_need_no_time(tmp_path: Path) -> None:
    _, store = made(tmp_path)
    (tmp_path / f"{bytes(32).hex()}.kv").write_bytes(b"old")
    store.close()
    moves = [Move(MoveKind.REMOVE, name=bytes(32)), Move(MoveKind.KEEP, 0, name=bytes(range(32)))]
    assert store.finish(moves, lambda: False) == 0 and names_on_disk(tmp_path) == ()
