"""Blocks that are written to disk while an engine is idle: which, how many, and what a full disk does."""

from pathlib import Path

import torch

from sluice_server.engine.kv_cache.behind import MOST, MOST_WAITING, WriteBehind
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.prefix import names_of, tenant_root
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers
from tests.engine.kv_cache.test_block_store import names_on_disk

ROOT = tenant_root(b"", "acme")
SIZE, BLOCKS = 4, 60


def filled(cache: KVCache, num: int, word: int = 0) -> BlockTable:
    """A table with so many named blocks."""
    tokens = list(range(word, word + num * SIZE))
    table = BlockTable(ROOT)
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def kept(moves: list[Move]) -> list[bytes]:
    return [move.name for move in moves if move.kind is MoveKind.KEEP]


def test_what_was_used_last_goes_first_and_a_few_at_a_time() -> None:
    cache = KVCache(BLOCKS, SIZE, True, Tiers(2, 50))
    old, new = filled(cache, 6), filled(cache, 3, 1000)
    cache.release(old)
    cache.release(new)
    behind, written = WriteBehind(cache), list[bytes]()
    while moves := behind.moves():
        assert len(moves) <= MOST and {move.kind for move in moves} == {MoveKind.KEEP}
        written += kept(moves)
    assert len(written) == 9 and set(written) == {cache.index.name_of(block) for block in range(9)}
    assert set(written[:3]) == {name for name in names_of(ROOT, list(range(1000, 1000 + 3 * SIZE)), SIZE)}
    assert behind.moves() == []
    filled(cache, 1, 2000)
    assert len(kept(behind.moves())) == 1


def test_the_disk_is_not_swamped() -> None:
    tiers = Tiers(2, 500)
    cache = KVCache(BLOCKS, SIZE, True, tiers)
    filled(cache, 50)
    behind, moves = WriteBehind(cache), list[Move]()
    while more := behind.moves():
        moves += more
    assert MOST_WAITING - MOST < len(moves) <= MOST_WAITING
    for move in moves:
        tiers.ended(move, is_good=True)
    assert len(behind.moves()) == MOST and tiers.stats.num_written == len(moves)


def test_a_disk_that_takes_nothing_is_left_alone_until_there_is_something_new() -> None:
    tiers = Tiers(2, 50)
    cache = KVCache(BLOCKS, SIZE, True, tiers)
    filled(cache, 2)
    behind = WriteBehind(cache)
    for move in behind.moves():
        tiers.ended(move, is_good=False)
    assert behind.moves() == [] and tiers.num_disk == 0 and tiers.stats.num_failed == 2
    filled(cache, 1, 1000)
    assert len(kept(behind.moves())) == 3


def test_a_full_disk_lets_go_of_what_nothing_else_has() -> None:
    tiers = Tiers(2, 3, (b"a" * 32, b"b" * 32))
    cache = KVCache(BLOCKS, SIZE, True, tiers)
    filled(cache, 9)
    moves = WriteBehind(cache).moves()
    assert [move.name for move in moves if move.kind is MoveKind.REMOVE] == [b"a" * 32, b"b" * 32]
    assert len(kept(moves)) == 3
    tiers.check()


def test_without_a_disk_there_is_nothing_to_do() -> None:
    for tiers in (None, Tiers(2, 0)):
        cache = KVCache(BLOCKS, SIZE, True, tiers)
        filled(cache, 3)
        assert WriteBehind(cache).moves() == []


def test_a_process_that_is_killed_leaves_what_was_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    store = BlockStore([torch.randn(BLOCKS + 1, SIZE, 2, 1, 16)], 2, tmp_path)
    cache = KVCache(BLOCKS, SIZE, True, Tiers(2, 50, names_on_disk(tmp_path)))
    table = filled(cache, 5)
    contents = {name: store.cache[0][block].clone() for name, block in zip(table.names, table.blocks, strict=True)}
    behind = WriteBehind(cache)
    store.move(behind.moves())
    for block in table.blocks[1:]:
        store.cache[0][block].fill_(0.0)  # what was moved is what was there
    store.move(behind.moves())
    store.close()  # its thread has written; nothing was saved
    again = Tiers(5, 50, names_on_disk(tmp_path))
    other = BlockStore([torch.zeros(BLOCKS + 1, SIZE, 2, 1, 16)], 5, tmp_path)
    assert again.num_disk == 5
    for name in table.names[1:]:
        moves = again.read(name)
        assert moves is not None
        other.move(moves)
    other.close()
    ended = other.moved()
    assert len(ended) == 4 and all(is_good for _, is_good in ended)
    for move, _ in ended:
        again.ended(move, is_good=True)
    for at, name in enumerate(table.names[1:]):
        other.move([again.restore(name, at)])
        assert torch.equal(other.cache[0][at], contents[name])
