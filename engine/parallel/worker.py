"""What a rank other than 0 does: it carries out orders in their sequence, and samples nothing."""

import logging
import time
from collections.abc import Callable

import numpy as np

from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.groups import LayerGroups, one_group
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.models.given import GivenRows
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.adapters import RankAdapters
from sluice_server.engine.parallel.device_steps import ON_CPU, DeviceSteps
from sluice_server.engine.parallel.messages import (
    BeginStep,
    FillSlot,
    GiveRows,
    Launch,
    Launched,
    MoveAccepted,
    MoveBlocks,
    Order,
    Place,
    SaveBlocks,
)
from sluice_server.engine.parallel.stages import StageFailed, Stages
from sluice_server.engine.parallel.sums import SumsBroken, TimedSums, patience_s
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.engine.parallel.told_rows import rows_of, turned_of
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.forward import ForwardPass
from sluice_server.engine.worker.sample_positions import SamplePositions
from sluice_server.engine.worker.slots.adapters import NO_SLOTS, SlotAdapters

logger = logging.getLogger(__name__)

ON_DISK = (MoveKind.READ, MoveKind.WRITE, MoveKind.KEEP, MoveKind.CLEAR)  # whose ends are told
STEPS = 16  # over whose times a mean is taken


class RankWorker:
    """Computes one rank's part of a model, with its part of the cache and the block tables of all slots."""

    def __init__(  # noqa: PLR0913 # the parts and sizes of a runner
        self,
        rank: int,
        model: Model,
        store: BlockStore,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        groups: LayerGroups | None = None,
        sums: TimedSums | None = None,
        stages: Stages | None = None,
        adapters: RankAdapters | None = None,
        steps: DeviceSteps = ON_CPU,
    ) -> None:
        """`sums` of this rank with the others; None where each rank computes the whole model. `adapters`: None where
        requests name none. `steps` of a rank that has a GPU."""
        self._steps = steps
        self.adapters = adapters
        self._slot_adapters = SlotAdapters(NO_SLOTS if adapters is None else adapters)
        self.step_s = 0.0  # mean of recent launches
        self._rank = rank
        self._num_moving = 0
        self._given: list[GivenRows] = []  # for the next launch
        self._model = model
        self._store = store
        self._sums = sums
        self._stages = stages
        groups = groups or one_group(model.config.windows)
        self._tables = np.zeros((groups.num, max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._forward = ForwardPass(model, store, block_size, self._tables, groups)

    def close(self) -> None:
        """Ends the thread that reads adapters."""
        if self.adapters is not None:
            self.adapters.loader.close()

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Registers `on_layer`, called after each computed layer."""
        self._model.on_layer = on_layer

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the transfers with the disk that have ended since the last call, each with whether it succeeded."""
        ended = self._store.moved()
        self._num_moving -= len(ended)
        return ended

    @property
    def is_moving(self) -> bool:
        """Whether there are transfers with the disk that have not ended."""
        return self._num_moving > 0

    def carry_out(self, order: Order) -> Launched | None:
        """Does what rank 0 says; returns how a launch ended. Raises SumsBroken when the group has ended."""
        match order:
            case Launch():
                return self._launch(order, lambda: self._compute(order))
            case BeginStep():
                return self._launch(order, lambda: self._steps.begin(order))
            case GiveRows():
                self._given.append(rows_of(order))
            case Place():
                self._place(order)
            case FillSlot():
                assert self.adapters is not None, "an adapter of requests that name none"
                self.adapters.fill(order)
            case MoveBlocks():
                self._num_moving += sum(move.kind in ON_DISK for move in order.moves)
                with self._steps.aside():
                    self._store.move(order.moves)
            case SaveBlocks():
                end_s = time.monotonic() + order.seconds
                self._store.close()
                self._store.finish(order.moves, lambda: time.monotonic() < end_s)
            case MoveAccepted():
                self._forward.move_accepted(order.moves)
            case _:
                raise ValueError(f"{type(order).__name__} is no order for a rank that computes")
        return None

    def _place(self, order: Place) -> None:
        self._tables[:, order.slots] = 0
        for slot, adapter in zip(order.slots, order.adapters, strict=True):
            self._slot_adapters.put(slot, adapter)
        for run in order.new_blocks:
            self._tables[run.group, run.slot, run.first : run.first + len(run.blocks)] = run.blocks
        self._steps.extend(order.new_blocks)

    def _launch(self, launch: Launch | BeginStep, compute: Callable[[], None]) -> Launched:
        if self._sums is not None:
            self._sums.timeout_s = patience_s(self.step_s)
        if self._stages is not None:
            self._stages.timeout_s = patience_s(self.step_s)
            self._stages.begin()
        start, error, ran_out = time.monotonic(), "", False
        try:
            with device_faults():
                self._steps.join()
                compute()
        except SumsBroken:
            raise
        except StageFailed:
            logger.info("launch %d failed in an earlier stage, which tells rank 0 why", launch.num)
        except Exception as failure:
            logger.exception("launch %d failed", launch.num)
            error, ran_out = repr(failure), isinstance(failure, OutOfDeviceMemory)
        if self._stages is not None:
            self._stages.settle()
        taken_s = time.monotonic() - start
        self.step_s += (taken_s - self.step_s) / STEPS
        sums_s = sum(one.seconds for one in (self._sums, self._stages) if one is not None)
        num_sums = self._sums.calls if isinstance(self._sums, NcclSums) else 0
        return Launched(self._rank, launch.num, error, ran_out, taken_s, sums_s, num_sums)

    def _compute(self, launch: Launch) -> None:
        positions = SamplePositions.of(launch.plan)
        failure, sides = None, None
        try:
            sides = self._slot_adapters.sides(launch.plan)
        except Exception as error:  # the other ranks' sums need those of this one: what they give is not used
            failure = error
        given, self._given = self._given, []
        turned, is_whole = turned_of(launch.turned), launch.is_whole
        states = self._forward.compute(
            launch.plan, positions, is_whole=is_whole, given=given, turned=turned, sides=sides
        )
        if self._model.is_last:
            for first, end in launch.spans:
                self._model.logits(states.computed[first:end])
            if positions.rows:
                self._model.logits(states.sampled)
        if failure is not None:
            raise failure
