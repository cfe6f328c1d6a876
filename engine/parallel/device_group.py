"""Runs plans on all ranks of a group that have a GPU each; this process is rank 0.

Rank 0 tells the others of a step before it begins it, and puts it into its device's queue without waiting: sums, and
the ids that rank 0 samples, reach the others on the devices. A launch is joined when it is collected: every rank must
then have it in its queue, with as many sums as rank 0. Ranks that have not are out of step, and the group ends, as it
does when a rank ends or the devices stand still.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor

from sluice_server.engine.errors import DeviceLost, RankLost
from sluice_server.engine.executor.step_runner import Pending
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.parallel.disk_ends import DiskEnds
from sluice_server.engine.parallel.group import Workers
from sluice_server.engine.parallel.launches import GroupLaunches, check_ended
from sluice_server.engine.parallel.messages import BeginStep, Launch, MoveAccepted, MoveBlocks, Place
from sluice_server.engine.parallel.sums import SumsBroken, patience_s
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.engine.parallel.told_rows import rows_as_told, turned_as_told
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.worker.device import Device, HostCopy
from sluice_server.engine.worker.overlapped import OverlappedRunner
from sluice_server.engine.worker.runner import Runner, StepImages
from sluice_server.engine.worker.step_numbers import StepNumbers
from sluice_server.engine.worker.steps import SampledIds

SPINS = 2000  # looks at the device before rank 0 sleeps between them
SLEEP_S = 1e-4


class ToldSteps:
    """Implements `Followers`: tells the other ranks.

    Attributes:
        num: number of the latest launch that they were told.
    """

    def __init__(self, workers: Workers, plain: Runner, sums: NcclSums) -> None:
        self.num = 0
        self._workers = workers
        self._plain = plain
        self._sums = sums
        self._tokens: list[tuple[int, int, list[int]]] = []

    @property
    def sampled_ids(self) -> SampledIds:
        """Implements `Followers.sampled_ids`."""
        return self._sums.sampled_ids

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Implements `Followers.note`."""
        self._tokens.append((slot, first, list(ids)))

    def begin(self, numbers: StepNumbers, *, is_sampled: bool) -> None:
        """Implements `Followers.begin`."""
        tokens, self._tokens = self._tokens, []
        self.num += 1
        key, arrays = numbers.key, (numbers.given.tobytes(), numbers.form.tobytes())
        shape = key.num_rows, key.per_row, key.form.name
        self._workers.send(BeginStep(self.num, *shape, *arrays, tokens, is_sampled))

    def compute(self, plan: StepPlan) -> StepImages:
        """Implements `Followers.compute`."""
        images = self._plain.images(plan)
        for told in rows_as_told(images.given):
            self._workers.send(told)
        self.num += 1
        bare = dataclasses.replace(plan, placements=[], new_blocks=[])
        self._workers.send(Launch(self.num, bare, *self._plain.wanted(plan), turned_as_told(images.turned)))
        return images


class DeviceGroupRunner:
    """Runs each plan on rank 0 by `own`, and on the other ranks.

    Attributes:
        launches: how they ended, and how long they took; of other ranks until a step was in their device's queue.
    """

    def __init__(  # noqa: PLR0913 # the parts of a group
        self,
        own: OverlappedRunner,
        plain: Runner,
        told: ToldSteps,
        workers: Workers,
        sums: NcclSums,
        launches: GroupLaunches,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.launches = launches
        self._own = own
        self._told = told
        self._workers = workers
        self._sums = sums
        self._clock = clock
        self._ends = DiskEnds(len(launches.times))
        self._joined = 0  # number of the latest launch that was joined
        self._calls: dict[int, int] = {}  # of sums here behind each launch that was not joined yet
        plain.on_accepted = lambda moves: workers.send(MoveAccepted(moves))

    @property
    def depth(self) -> int:
        """Number of steps that may be in flight while the next one is planned."""
        return self._own.depth

    @property
    def progress(self) -> int:
        """Number of layers and recorded steps computed here since start."""
        return self._own.progress

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Registers `on_layer`, called after each layer that is computed here outside recorded steps."""
        self._own.watch(on_layer)

    def move(self, moves: list[Move]) -> None:
        """Carries out transfers between cache blocks and tiers on all ranks."""
        self._workers.send(MoveBlocks(moves))
        self._own.move(moves)

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the transfers with the disk that have ended on all ranks. What failed on one is removed on all."""
        self.launches.look()
        ended, lost = self._ends.of_all(self._own.moved(), self._workers.moved())
        if lost:
            self.move(lost)
        return ended

    def place(self, plan: StepPlan) -> None:
        """Applies the plan's placements and block-table additions on all ranks."""
        if plan.placements or plan.new_blocks:
            placed = [one.slot for one in plan.placements], plan.new_blocks, [one.adapter for one in plan.placements]
            self._workers.send(Place(*placed))
        self._own.place(plan)

    def idle(self) -> bool:
        """Returns False: all steps are recorded at start. Raises RankLost if a rank has ended."""
        self.launches.look()
        return False

    def launch(self, plan: StepPlan) -> Pending:
        """Begins a step on all ranks. Raises RankLost if that fails here or on another rank in the midst of a step."""
        start = self._clock()
        self._sums.timeout_s = patience_s(self.launches.step_s)
        try:
            pending = self._own.launch(plan)
        except SumsBroken as error:
            raise RankLost(str(error)) from error
        except DeviceLost:
            raise
        except Exception:
            self._calls[self._told.num] = self._sums.calls
            self.join(self._told.num, self._clock() - start)
            raise
        self._calls[self._told.num] = self._sums.calls
        return GroupStep(self, self._told.num, pending, start, self._clock)

    def join(self, num: int, compute_s: float) -> None:
        """Waits until every rank has launches in its queue, up to this one.

        Raises RankLost for ranks out of step; then OutOfDeviceMemory or RankFailed if one failed: all can try again.
        """
        while self._joined < num:
            self._joined += 1
            ended, own = self.launches.join(self._joined, compute_s), self._calls.pop(self._joined)
            for one in ended:
                if one.num_sums != own:
                    text = f"rank {one.rank} is at sum {one.num_sums}, rank 0 at {own}: start the group anew"
                    raise RankLost(f"{text} ({one.error})" if one.error else text)
            check_ended(ended)


class GroupStep:
    """A step that all devices of a group compute."""

    def __init__(
        self, group: DeviceGroupRunner, num: int, pending: Pending, start: float, clock: Callable[[], float]
    ) -> None:
        self._group = group
        self._num = num
        self._pending = pending
        self._start = start
        self._clock = clock

    @property
    def is_done(self) -> bool:
        """Whether the step, and all before it, have been waited for already."""
        return self._pending.is_done

    def collect(self) -> StepResult:
        """Waits until all ranks have begun the step, and then for the device. Raises as `DeviceGroupRunner.join`."""
        self._group.join(self._num, self._clock() - self._start)
        return self._pending.collect()


class WatchedDevice:
    """A device that is waited for no longer than ranks are, and not once one of them has ended."""

    def __init__(self, device: Device, launches: GroupLaunches, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._launches = launches
        self._clock = clock

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        """Implements `Device.upload`."""
        return self._device.upload(values)

    def download(self, values: Tensor) -> HostCopy:
        """Implements `Device.download`."""
        return WatchedCopy(self._device.download(values), self._launches, self._clock)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Implements `Device.capture`."""
        return self._device.capture(body)

    def aside(self) -> AbstractContextManager[None]:
        """Implements `Device.aside`."""
        return self._device.aside()

    def join(self) -> None:
        """Implements `Device.join`."""
        self._device.join()

    def taken(self) -> int:
        """Implements `Device.taken`."""
        return self._device.taken()


class WatchedCopy:
    """A copy to the host in progress, behind sums with other ranks."""

    def __init__(self, copy: HostCopy, launches: GroupLaunches, clock: Callable[[], float]) -> None:
        self._copy = copy
        self._launches = launches
        self._clock = clock

    @property
    def is_there(self) -> bool:
        """Implements `HostCopy.is_there`."""
        return self._copy.is_there

    def wait(self) -> "np.ndarray[Any, Any]":
        """Implements `HostCopy.wait`. Raises RankLost when a rank has ended, and when the device stands still."""
        patient_s, spins = patience_s(self._launches.step_s), 0
        until_s = self._clock() + patient_s
        while not self._copy.is_there:
            spins += 1
            if spins < SPINS:
                continue
            self._launches.look()
            if self._clock() > until_s:
                text = f"the device has not ended a step within {patient_s:g} s: a rank is missing in its sums"
                raise RankLost(f"{text}, or it is stuck; start the group anew")
            time.sleep(SLEEP_S)
        return self._copy.wait()


def over_devices(
    plain: Runner,
    workers: Workers,
    sums: NcclSums,
    record: Callable[[ToldSteps, Callable[[Device], Device]], OverlappedRunner],
) -> DeviceGroupRunner:
    """Returns a runner of the group; `record` makes that of rank 0, over a device that the function given watches."""
    launches = GroupLaunches(workers, workers.shape.members, (sums,), time.monotonic)
    told = ToldSteps(workers, plain, sums)
    own = record(told, lambda device: WatchedDevice(device, launches))
    return DeviceGroupRunner(own, plain, told, workers, sums, launches)
