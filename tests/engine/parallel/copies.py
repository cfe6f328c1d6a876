"""Ranks without processes: each computes the whole model, so that every cache must hold the same bytes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sluice_server.engine.build_model import ModelSource, chosen, loaded
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import RankLost
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.parallel.group import GroupRunner
from sluice_server.engine.parallel.messages import Launched, Moved, Order
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import Stages
from sluice_server.engine.parallel.sums import TimedSums
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.startup.allocation import groups_for
from sluice_server.services.ranks.codec import ORDERS


class Copies:
    """Implements `Workers` by ranks of this thread. Orders go through their encoding."""

    depth = 0

    def __init__(self, ranks: list[RankWorker]) -> None:
        self.orders: list[Order] = []
        self.shape = ParallelShape(1 + len(ranks))
        self._ranks = ranks
        self._ended: list[Launched] = []
        self.lost = ""
        self.told: list[Moved] = []

    @property
    def sums(self) -> TimedSums:
        raise AssertionError("copies have no sums")

    @property
    def stages(self) -> Stages | None:
        return None

    def ready(self, layout: str) -> None:
        """Copies have the same layout."""

    def send(self, order: Order) -> None:
        self.orders.append(order)
        for rank in self._ranks:
            ended = rank.carry_out(ORDERS.decode(ORDERS.encode(order)))
            if ended is not None:
                self._ended.append(ended)

    def moved(self) -> list[Moved]:
        found, self.told = self.told, []
        return found

    def save(self, moves: list[Move], seconds: float) -> None:
        raise AssertionError("copies have no disk")

    def saved(self, seconds: float) -> None:
        raise AssertionError("copies have no disk")

    def look(self) -> None:
        if self.lost:
            raise RankLost(self.lost)

    def launched(self, num: int) -> list[Launched]:
        ended, self._ended = self._ended, []
        assert [one.num for one in ended] == [num] * len(self._ranks)
        return ended


@dataclasses.dataclass(frozen=True)
class CopiedGroup:
    """An engine over rank 0 and copies, and cache and block tables of each rank."""

    engine: Engine
    workers: Copies
    caches: list[list[torch.Tensor]]
    tables: list[np.ndarray[Any, Any]]

    def check(self) -> None:
        """Asserts that every rank holds the same bytes."""
        for cache in self.caches[1:]:
            for mine, its in zip(self.caches[0], cache, strict=True):
                assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
        for tables in self.tables[1:]:
            assert np.array_equal(tables, self.tables[0])


def copied(engine: Engine, directory: Path, config: EngineConfig, num: int = 1) -> CopiedGroup:
    """Returns the engine over itself and `num` further ranks with the same weights."""
    plain = engine.runner
    assert isinstance(plain, Runner)
    own = plain._store
    ranks, caches, tables = [], [own.cache], [plain._rows.block_tables]
    for rank in range(1, 1 + num):
        model_config = read_config(directory)
        limits = limits_of(config, model_config, 1 << 20)
        device, formats, _ = chosen(config, model_config, limits)
        model, _ = loaded(ModelSource(config, model_config, directory, limits, formats, device))
        groups = groups_for(config, model, has_drafter=False)
        cache = model.new_cache(len(own.cache[0]) - 1, config.block_size, formats.cache, groups.size)
        for mine, its in zip(own.cache, cache, strict=True):  # block 0 was computed at start
            its.copy_(mine)
        store = BlockStore(cache, len(own._host[0]) if own._host else 0)
        caches.append(cache)
        sizes = config.block_size, config.sized("cpu").max_num_seqs, limits.context_length
        ranks.append(RankWorker(rank, model, store, *sizes, groups))
        tables.append(ranks[-1]._tables)
    workers = Copies(ranks)
    runner = GroupRunner(plain, workers, 1 + num)
    return CopiedGroup(Engine(engine.scheduler, runner, proposer=engine.proposer), workers, caches, tables)
