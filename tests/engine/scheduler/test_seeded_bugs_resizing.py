"""Bugs planted in the resizing of caches: the simulator notices each of them soon."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache import resizing as cache_resizing
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.kv_cache.pool import OFFLINE, BlockPool, EvictionClass
from sluice_server.engine.kv_cache.prefix import PrefixIndex
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.scheduler import resizing
from sluice_server.engine.scheduler.resizing import CacheResizer
from sluice_server.engine.scheduler.state import SchedulerState
from tests.engine.scheduler.seeded_bugs import Bug, cases
from tests.engine.scheduler.simulate import Simulation

SEEDS = range(1, 48, 2)  # whose caches are resized
EVENTS = 2500


def copy_nothing(cache: KVCache, tables: Iterable[BlockTable], limit: int) -> dict[int, int]:
    moved = evacuate(cache, tables, limit)
    cache.take_moves()
    return moved


def move_without_sharing(cache: KVCache, tables: Iterable[BlockTable], limit: int) -> dict[int, int]:
    return evacuate(cache, list(tables)[:1], limit)


def leave_the_name(self: PrefixIndex, block: int, target: int) -> None:
    """The name stays with the block that goes offline."""


def tell_no_slot(self: SchedulerState, moved: Mapping[int, int]) -> None:
    """The runner keeps the old block tables."""


def forget_no_name(cache: KVCache, num_blocks: int) -> None:
    cache.pool.resize(num_blocks)


def release_to_the_free(self: BlockPool, block: int, keep: EvictionClass = EvictionClass.NORMAL) -> None:
    self._refs[block] -= 1
    if self._refs[block] == 0:
        self._insert(block, self.size + keep)


def grow_what_is_held(self: BlockPool, num_blocks: int) -> list[int]:
    before, self.num_blocks = self.num_blocks, num_blocks
    left = [block for block in range(num_blocks, before) if self._refs[block] == 0]
    for block in left:
        self._unlink(block)
        self._take_offline(block)
    for block in range(before, num_blocks):
        self.num_offline -= self._refs[block] == OFFLINE
        self._refs[block] = 0
        self._insert(block, self.size + EvictionClass.NOT)
    return left


def refuse_nothing(self: CacheResizer, num_blocks: int) -> None:
    cache_resizing.set_limit(self._state.cache, num_blocks)


def keep_the_host_slots(self: Tiers, num_host: int) -> list[Move]:
    self._num_host = num_host
    return []


evacuate = cache_resizing.evacuate

BUGS: list[Bug] = [
    (resizing, "evacuate", copy_nothing),
    (resizing, "evacuate", move_without_sharing),
    (PrefixIndex, "move", leave_the_name),
    (SchedulerState, "relocated", tell_no_slot),
    (resizing, "set_limit", forget_no_name),
    (BlockPool, "release", release_to_the_free),
    (BlockPool, "resize", grow_what_is_held),
    (CacheResizer, "set_limit", refuse_nothing),
    (Tiers, "resize", keep_the_host_slots),
]


@pytest.mark.parametrize(("owner", "name", "bug"), cases(BUGS))
def test_the_simulator_notices(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, ServiceError)):
        for seed in SEEDS:
            Simulation(seed).run(EVENTS)
