"""Bugs planted in the block cache and its tiers: the simulator notices each of them soon."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sluice_server.engine.kv_cache import cache as cache_module
from sluice_server.engine.kv_cache import lookup as lookup_module
from sluice_server.engine.kv_cache import prefix
from sluice_server.engine.kv_cache import table as table_module
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.lookup import PrefixLookup
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.pool import BlockPool
from sluice_server.engine.kv_cache.prefix import PrefixIndex
from sluice_server.engine.kv_cache.sizes import CacheSizes
from sluice_server.engine.kv_cache.table import BlockTable, CachedPrefix
from sluice_server.engine.kv_cache.tiers import Tiers
from tests.engine.scheduler.seeded_bugs import Bug, assert_noticed, cases


def skip_release(self: KVCache, table: BlockTable, *_: object, **__: object) -> None:
    for own in table.groups:
        own.clear()
    table.num_named = 0


def release_twice(self: KVCache, table: BlockTable, *_: object, **__: object) -> None:
    for own in table.groups:
        for block in own * 2:
            self.pool.release(block)
        own.clear()


def share_without_counting(self: BlockPool, block: int) -> None:
    if self._refs[block] == 0:
        self._unlink(block)
        self._refs[block] = 1


def share_without_unlinking(self: BlockPool, block: int) -> None:
    self._refs[block] += 1


def grow_one_short(self: KVCache, table: BlockTable, num_tokens: int) -> bool:
    return grow(self, table, num_tokens - 1)


def name_too_early(self: KVCache, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
    commit(self, table, tokens, min(num_computed + self.block_size, len(tokens)))


def forget_nothing(self: PrefixIndex, block: int) -> bool:
    return False


def name_without_parent(parent: bytes, tokens: Sequence[int], content: bytes) -> bytes:
    return name_block(b"", tokens, content)


def name_without_framing(parent: bytes, tokens: Sequence[int], content: bytes) -> bytes:
    return name_block(parent, [sum(tokens)], content)


def fork_without_counting(self: KVCache, table: BlockTable, num_tokens: int) -> BlockTable:
    child = fork(self, table, num_tokens)
    for block in child.blocks:
        self.pool.release(block)
    return child


def write_to_a_shared_tail(self: KVCache, table: BlockTable, num_tokens: int) -> BlockTable:
    child = fork(self, table, num_tokens)
    child.shared_tail = table.shared_tail = -1
    return child


def lose_a_move(self: KVCache) -> list[Move]:
    return take_moves(self)[1:]


def copy_the_other_way(self: KVCache) -> list[Move]:
    turned = [(move.target, move.source) if move.kind is MoveKind.COPY else (-1, -1) for move in take_moves(self)]
    return [Move(MoveKind.COPY, *ends) for ends in turned if ends != (-1, -1)]


def move_in_another_order(self: KVCache) -> list[Move]:
    return take_moves(self)[::-1]


def use_a_bad_read(self: Tiers, move: Move, is_good: bool) -> None:
    tier_ended(self, move, is_good=True)


def reuse_a_slot_that_is_read_into(self: Tiers, name: bytes) -> list[Move] | None:
    moves = read(self, name)
    if moves is not None:
        self._free.append(moves[-1].target)
    return moves


def save_under_the_slot_of_another(self: Tiers, name: bytes, block: int) -> list[Move]:
    moves = save(self, name, block)
    if moves and len(self._host) > 1:
        other = next(iter(self._host))
        self._host[name], self._host[other] = self._host[other], self._host[name]
    return moves


def forget_the_disk_budget(self: Tiers, name: bytes, slot: int) -> list[Move]:
    self._disk.add(name)
    return [Move(MoveKind.WRITE, slot, name=name)]


def trim_a_block_too_many(self: CacheSizes, group: int, num_computed: int) -> int:
    return passed(self, group, num_computed + self.block_size) if num_computed else 0


def trim_without_telling(self: KVCache, table: BlockTable, num_computed: int) -> list[tuple[int, int, int]]:
    self.pool.release(table.blocks[0])
    return []


def match_without_windows(
    self: PrefixLookup, table: BlockTable, tokens: Sequence[int], found: list[list[int]]
) -> CachedPrefix:
    num, num_full = len(found[0]), len(self._full)
    return CachedPrefix(num, [*found[:num_full], *([self._null] * num for _ in found[num_full:])])


def name_groups_alike(name: bytes, group: int) -> bytes:
    return name


grow = KVCache.grow
commit = KVCache.commit
name_block = prefix.name_block
fork = KVCache.fork
take_moves = KVCache.take_moves
tier_ended = Tiers.ended
read = Tiers.read
save = Tiers.save
passed = CacheSizes.num_passed

BUGS: list[Bug] = [
    (KVCache, "release", skip_release),
    (KVCache, "release", release_twice),
    (BlockPool, "share", share_without_counting),
    (BlockPool, "share", share_without_unlinking),
    (KVCache, "grow", grow_one_short),
    (KVCache, "commit", name_too_early),
    (PrefixIndex, "forget", forget_nothing),
    (table_module, "name_block", name_without_parent),
    (table_module, "name_block", name_without_framing),
    (KVCache, "fork", fork_without_counting),
    (KVCache, "fork", write_to_a_shared_tail),
    (KVCache, "take_moves", lose_a_move),
    (KVCache, "take_moves", copy_the_other_way),
    (KVCache, "take_moves", move_in_another_order),
    (Tiers, "ended", use_a_bad_read),
    (Tiers, "read", reuse_a_slot_that_is_read_into),
    (Tiers, "save", save_under_the_slot_of_another),
    (Tiers, "_to_disk", forget_the_disk_budget),
    (CacheSizes, "num_passed", trim_a_block_too_many),
    (KVCache, "trim", trim_without_telling),
    (PrefixLookup, "within_windows", match_without_windows),
    ((cache_module, lookup_module), "name_in", name_groups_alike),
]
LATE = (
    trim_a_block_too_many,
    match_without_windows,
    name_groups_alike,
    use_a_bad_read,
    reuse_a_slot_that_is_read_into,
)


@pytest.mark.parametrize(("owner", "name", "bug"), cases(BUGS, LATE))
def test_the_simulator_notices(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in owner if isinstance(owner, tuple) else (owner,):
        monkeypatch.setattr(one, name, bug)
    assert_noticed()
