"""Runs plans on all ranks of a group; this process is rank 0, which alone samples.

Everything that changes a cache or computes is sent to the other ranks before it is done here, in one order. All ranks
tell how a launch ended before the next one is computed here, so that retries stay in step. With stages, as many
launches are under way, see `backlog`. A rank that ends, or says nothing for too long, ends the group.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from sluice_server.engine.errors import RankLost
from sluice_server.engine.executor.step_runner import Pending
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.parallel.backlog import Backlog
from sluice_server.engine.parallel.disk_ends import DiskEnds
from sluice_server.engine.parallel.launches import GroupLaunches, check_ended
from sluice_server.engine.parallel.messages import Launch, Launched, MoveAccepted, MoveBlocks, Moved, Order, Place
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import StageFailed, Stages
from sluice_server.engine.parallel.sums import SumsBroken, TimedSums, patience_s
from sluice_server.engine.parallel.told_rows import rows_as_told, turned_as_told
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.worker.runner import CompletedStep, Runner, StepImages


class Workers(Protocol):
    """The other ranks of a group, as rank 0 reaches them. Each call raises RankLost once one of them has ended."""

    @property
    def shape(self) -> ParallelShape:
        """The shape of the group, from the place of rank 0."""

    @property
    def sums(self) -> TimedSums:
        """The sums of rank 0 with the others."""

    @property
    def stages(self) -> Stages | None:
        """The connections of rank 0 with other stages; None where there is one stage."""

    @property
    def depth(self) -> int:
        """Steps that other stages may compute before rank 0 comes to them."""

    def send(self, order: Order) -> None:
        """Sends an order to every rank; returns at once."""

    def ready(self, layout: str) -> None:
        """Waits until every rank has loaded its part of the model. Raises ServiceError if one has another layout."""

    def look(self) -> None:
        """Raises RankLost if a rank has ended; returns at once."""

    def moved(self) -> list[Moved]:
        """Returns what the other ranks have told of transfers with the disk since the last call."""

    def save(self, moves: list[Move], seconds: float) -> None:
        """Lets every rank save its parts of the cache, for so long at most; nothing is computed afterwards."""

    def saved(self, seconds: float) -> None:
        """Waits, for at most so long, until every rank has saved its parts of the cache."""

    def launched(self, num: int) -> list[Launched]:
        """Waits until every rank has told how this launch ended, and keeps what is told of later ones. Raises RankLost
        for a rank that does not in time."""


class GroupRunner:
    """Runs each plan on rank 0 by `plain`, and on the other ranks.

    Attributes:
        launches: how they ended, and how long they took.
    """

    def __init__(  # noqa: PLR0913 # the parts of a group
        self,
        plain: Runner,
        workers: Workers,
        size: int,
        sums: TimedSums | None = None,
        clock: Callable[[], float] = time.monotonic,
        stages: Stages | None = None,
        *,
        depth: int = 0,
        drafts_in_cache: bool = False,
    ) -> None:
        """`sums` of rank 0 with the others; None where each rank computes the whole model. `depth`: of the steps under
        way, those that other stages compute meanwhile. `drafts_in_cache`: what drafts writes to blocks of its own
        between steps, so that no move may wait."""
        self._plain = plain
        self._workers = workers
        self._stages = stages
        self._timed = [one for one in (sums, stages) if one is not None]
        self.launches = GroupLaunches(workers, size, self._timed, clock)
        self._clock = clock
        self._ends = DiskEnds(size)
        self._num = 0
        self._depth = depth
        self._backlog = Backlog()
        self._drafts_in_cache = drafts_in_cache
        plain.on_accepted = lambda moves: workers.send(MoveAccepted(moves))

    @property
    def depth(self) -> int:
        """Number of steps that may be in flight while the next one is planned."""
        return self._depth

    @property
    def progress(self) -> int:
        """Number of layers computed since start."""
        return self._plain.progress

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Registers `on_layer`, called after each layer computed here."""
        self._plain.watch(on_layer)

    def move(self, moves: list[Move]) -> None:
        """Carries out transfers between cache blocks and tiers on all ranks."""
        self._workers.send(MoveBlocks(moves))
        if self._drafts_in_cache:
            self._backlog.catch_up()
        self._backlog.do(partial(self._plain.move, moves))

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the transfers with the disk that have ended on all ranks. What failed on one is removed on all."""
        self.launches.look()
        ended, lost = self._ends.of_all(self._plain.moved(), self._workers.moved())
        if lost:
            self.move(lost)
        return ended

    def place(self, plan: StepPlan) -> None:
        """Applies the plan's placements and block-table additions on all ranks."""
        if plan.placements or plan.new_blocks:
            placed = [one.slot for one in plan.placements], plan.new_blocks, [one.adapter for one in plan.placements]
            self._workers.send(Place(*placed))
            if any(map(self._plain.is_told, plan.placements)):
                self._backlog.catch_up()  # what the other ranks are told of the next launch depends on it
            self._backlog.do(partial(self._plain.place, plan))

    def idle(self) -> bool:
        """Returns False: there is nothing to prepare. Raises RankLost if a rank has ended."""
        self.launches.look()
        return False

    def launch(self, plan: StepPlan) -> Pending:
        """Computes the plan's rows on all ranks; with stages, here only when it is collected.

        That raises RankFailed or OutOfDeviceMemory if it failed on another rank; all are then ready for the next
        launch. It raises RankLost if they are not.
        """
        wanted = self._plain.wanted(plan)
        is_alone = not self._depth or wanted.is_whole or bool(plan.parents)  # accepted branches move keys behind it
        if is_alone:
            self._backlog.catch_up()
        images = self._plain.images(plan)
        self._num += 1
        bare = dataclasses.replace(plan, placements=[], new_blocks=[])
        for told in rows_as_told(images.given):
            self._workers.send(told)
        self._workers.send(Launch(self._num, bare, *wanted, turned_as_told(images.turned)))
        if is_alone:
            return self._compute(self._num, plan, images)
        return self._backlog.step(partial(self._compute, self._num, plan, images))

    def _compute(self, num: int, plan: StepPlan, images: StepImages) -> CompletedStep:
        """Computes a launch here, and waits for its end on all ranks."""
        for one in self._timed:
            one.timeout_s = patience_s(self.launches.step_s)
        start = self._clock()
        try:
            with self._staged():
                done = self._plain.launch(plan, images)
        except SumsBroken as error:
            raise RankLost(str(error)) from error
        except StageFailed:
            check_ended(self.launches.join(num, self._clock() - start))
            raise
        except Exception:
            self.launches.join(num, self._clock() - start)
            raise
        check_ended(self.launches.join(num, self._clock() - start))
        return done

    @contextlib.contextmanager
    def _staged(self) -> Iterator[None]:
        """A launch as the other stages see it: whatever happens, they can begin the next one."""
        if self._stages is not None:
            self._stages.begin()
        try:
            yield
        except SumsBroken:
            raise
        except Exception:
            if self._stages is not None:
                self._stages.settle()
            raise
