"""Adapters of a scheduler's simulation: far more than slots, read slowly from a disk that sometimes loses one."""

import random

from sluice_server.engine.adapters.entry import OrderKind
from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import NO_ADAPTER, StepPlan
from sluice_server.engine.request import AdapterRef, EngineRequest
from sluice_server.engine.scheduler.adapters import RequestAdapters
from tests.engine.adapters.shelf_world import World

NUM = 14
SHELVES = ((1, 9, 9), (2, 12, 14), (3, 20, 40), (9, 16, None))  # slots, bytes in them, and in host memory
NO_SHELF = (0, 0, 0)


class FakeAdapters:
    """Carries out what a shelf orders, and checks every plan against what the slots then hold.

    requests: the books that the scheduler is given.
    num_steps: plans with adapters; num_lost: reads that failed; num_mixed: plans with several adapters and the base.
    """

    def __init__(self, rng: random.Random, is_used: bool) -> None:
        self._rng = rng
        self._is_used = is_used
        self.num_slots, device, host = rng.choice(SHELVES) if is_used else NO_SHELF
        self.shelf = Shelf(self.num_slots, device, host)
        self.requests = RequestAdapters(self.shelf, rng.choice((3.0, 30.0)))
        self._world = World(self.shelf, device)
        self._refs = [AdapterRef(bytes([i]) * 32, f"adapter-{i}", rng.randrange(1, 9)) for i in range(NUM)]
        self._world.sizes = {one.digest: one.num_bytes for one in self._refs}
        self._of_slot: dict[int, int] = {}  # the adapter slot of each row's slot
        self.num_steps = self.num_lost = self.num_mixed = self.num_dropped = 0

    @property
    def is_busy(self) -> bool:
        """Whether reads or loads have not ended."""
        return bool(self._world.under_way)

    @property
    def are_awaited(self) -> bool:
        """Whether requests name adapters, so that some may wait for a slot."""
        return bool(self.requests.num_open)

    def choose(self) -> AdapterRef | None:
        """Returns the adapter of a new request, of which two are wanted most of the time; None for the base."""
        if not self._is_used or self._rng.random() < 0.25:
            return None
        return self._rng.choice(self._refs[:2] if self._rng.random() < 0.6 else self._refs)

    def settle(self) -> None:
        """Lets some reads and loads end; now and then drops, pins or unpins an adapter."""
        while self._world.under_way and self._rng.random() < 0.6:
            is_read = self._world.under_way[0].kind is OrderKind.READ
            is_good = self._rng.random() > (0.05 if is_read else 0.1)
            self.num_lost += is_read and not is_good
            self._world.end(is_good)
        if self._is_used and self._rng.random() < 0.02:
            self._change(self._rng.choice(self._refs).digest)

    def _change(self, digest: bytes) -> None:
        kind = self._rng.randrange(3)
        if kind == 0:
            self.requests.drop(digest)
            self.num_dropped += 1
        elif kind == 1 and self.shelf.has(digest):
            self.shelf.unpin(digest)
        elif self.shelf.has(digest) and self.num_slots > 1:
            try:
                self.shelf.pin(digest)
            except ValueError:
                return

    def carry_out(self) -> None:
        """Begins what the plan ordered."""
        self._world.carry_out()

    def launch(self, plan: StepPlan, by_slot: dict[int, EngineRequest]) -> None:
        """Checks that every row is computed with its own adapter, that no more are in a step than there are slots, and
        that slots hold them. `by_slot`: the running requests."""
        for placement in plan.placements:
            self._of_slot[placement.slot] = placement.adapter
        used = set()
        for slot in plan.slots:
            request, adapter = by_slot.get(slot), self._of_slot[slot]
            if request is None:
                continue
            assert (adapter == NO_ADAPTER) == (request.adapter is None), "a row of another's adapter, or of none"
            if request.adapter is not None:
                assert self._world.slots.get(adapter) == request.adapter.digest, "a slot does not hold the adapter"
                used.add(adapter)
        assert len(used) <= self.num_slots, "more adapters in a step than slots"
        self.num_steps += bool(used)
        self.num_mixed += len(used) > 1 and any(self._of_slot[slot] == NO_ADAPTER for slot in plan.slots)

    def release(self) -> None:
        """Unpins all, so that what still waits can end."""
        for digest in list(self.shelf.entries()):
            self.shelf.unpin(digest)


def is_loss(error: ServiceError) -> bool:
    """Whether a request failed because its adapter's files are gone."""
    return error.reason == "ADAPTER_LOST"
