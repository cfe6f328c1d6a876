"""A group whose ranks are threads: each has its part of the model.

They add, and stages pass hidden states, over the memory that processes would share.
"""

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.parallel.build import RankPart, build_rank
from sluice_server.engine.parallel.messages import Allocate, Launch, Launched, Moved, Order, SaveBlocks
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages_shared import SharedMemoryStages, new_stages
from sluice_server.engine.parallel.sums import LocalSums, TimedSums
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from sluice_server.services.ranks.settings import config_of_rank
from tests.engine.parallel.rank_threads import WAIT_S, timed_sums

Within: TypeAlias = Callable[[int], contextlib.AbstractContextManager[object]]  # of a rank's number


class ThreadPlace(NamedTuple):
    """A rank's place in a group of threads."""

    shape: ParallelShape
    sums: TimedSums
    stages: SharedMemoryStages | None

    @property
    def ranks(self) -> Ranks:
        return Ranks(*self)


def places(shape: ParallelShape) -> list[ThreadPlace]:
    """The places of all ranks of a group."""
    size, num = shape.tensor_size, shape.pipeline_size
    sums = [one for _ in range(num) for one in timed_sums(size, shape.sum_shards)]
    each = [shape.of_member(member) for member in range(shape.members)]
    file = new_stages(shape) if num > 1 else None
    return [
        ThreadPlace(
            one,
            LocalSums(shape.sum_shards) if size == 1 else its,
            None if file is None else SharedMemoryStages(file, one, WAIT_S),
        )
        for one, its in zip(each, sums, strict=True)
    ]


class ThreadWorkers:
    """Implements `Workers`."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        ranks: Sequence[ThreadPlace] | None = None,
        within: Within = contextlib.nullcontext,
    ) -> None:
        """`ranks`: their places; None for those of `places`. Each runs within a context that gets its number."""
        self.shape = shape_of(config)
        self.depth = self.shape.pipeline_size - 1
        size = self.shape.members
        ranks = ranks or places(self.shape)
        self._within = within
        self.sums, self.stages = ranks[0].sums, ranks[0].stages
        self.orders: list[Order] = []
        self.errors: list[Exception] = []
        self._inboxes: list[queue.Queue[Order | None]] = [queue.Queue() for _ in range(1, size)]
        self._answers: queue.Queue[str | Launched] = queue.Queue()
        model = read_served(directory)
        limits = limits_of(config, model, 1 << 20)
        self._moved: list[Moved] = []
        self._saved: queue.Queue[int] = queue.Queue()
        self._launched: defaultdict[int, list[Launched]] = defaultdict(list)
        self._num_sent = 0  # launches
        self.num_ahead = 0  # of them, those that rank 0 had not computed when it waited for another, at most
        parts = [
            RankPart(config_of_rank(config, 0, at), model, directory, limits, rank.shape, rank.sums, rank.stages)
            for at, rank in enumerate(ranks[1:], 1)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=given) for given in zip(parts, self._inboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def ready(self, layout: str) -> None:
        for _ in self._threads:
            assert self._answers.get(timeout=WAIT_S) == layout

    def send(self, order: Order) -> None:
        self.orders.append(order)
        self._num_sent += isinstance(order, Launch)
        for inbox in self._inboxes:
            inbox.put(order)

    def look(self) -> None:
        """Threads end with their test."""

    def moved(self) -> list[Moved]:
        found, self._moved = self._moved, []
        return found

    def save(self, moves: list[Move], seconds: float) -> None:
        self.send(SaveBlocks(moves, seconds))

    def saved(self, seconds: float) -> None:
        for _ in self._threads:
            self._saved.get(timeout=WAIT_S)

    def launched(self, num: int) -> list[Launched]:
        self.num_ahead = max(self.num_ahead, self._num_sent - num)
        while len(self._launched[num]) < len(self._threads):
            one = self._answers.get(timeout=WAIT_S)
            assert isinstance(one, Launched) and num <= one.num <= num + self.shape.pipeline_size
            self._launched[one.num].append(one)
        return self._launched.pop(num)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self, part: RankPart, inbox: "queue.Queue[Order | None]") -> None:
        def sizes() -> Allocate:
            order = inbox.get(timeout=WAIT_S)
            assert isinstance(order, Allocate)
            return order

        try:
            with self._within(part.shape.member):
                worker = build_rank(part, self._answers.put, sizes)
                while (order := self._next(inbox, worker)) is not None:
                    ended = worker.carry_out(order)
                    if isinstance(order, SaveBlocks):
                        self._saved.put(part.shape.member)
                    if ended is not None:
                        self._answers.put(ended)
                worker.close()
        except Exception as error:
            self.errors.append(error)

    def _next(self, inbox: "queue.Queue[Order | None]", worker: RankWorker) -> Order | None:
        while True:
            ended = worker.moved()
            if ended:
                self._moved.append(Moved(worker._rank, ended))
            with contextlib.suppress(queue.Empty):
                return inbox.get(timeout=0.002 if worker.is_moving else WAIT_S)


@contextlib.contextmanager
def threaded(
    directory: Path,
    config: EngineConfig,
    draft: Path | None = None,
    limits: Limits | None = None,
    ranks: Sequence[ThreadPlace] | None = None,
    within: Within = contextlib.nullcontext,
) -> Iterator[Engine]:
    """An engine whose other ranks are threads; at the end it saves its cache if it has a directory. `limits`: None for
    those of text. `ranks`, `within`: see `ThreadWorkers`."""
    model = read_served(directory)
    limits = limits or limits_of(config, model, 1 << 20)
    grammars = grammars_of(directory, model.vocab_size, model.eos_ids)
    workers = ThreadWorkers(directory, config, ranks, within)
    given = config_of_rank(config), model, directory, limits, draft
    named = Digests(b"weights", b"draft")
    try:
        built = build_engine(*given, digests=lambda: named, grammars=grammars, workers=workers)
        yield built.engine
        built.close()
    finally:
        workers.close()
        if workers.errors:
            raise workers.errors[0]
