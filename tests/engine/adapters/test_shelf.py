"""The shelf of adapters under anything at any time: nothing runs with a copy that is not there, and every waiting
sequence ends although adapters outnumber slots. Bugs planted in it are noticed."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_server.engine.adapters.entry import Copy, Entry, Order, OrderKind
from sluice_server.engine.adapters.shelf import Shelf
from tests.engine.adapters.shelf_world import World

PATIENCE = 12  # steps after which a waiting sequence has waited for long


class ShelfMachine(RuleBasedStateMachine):
    """Any calls in any order."""

    @initialize(num_slots=st.integers(1, 3), device=st.sampled_from([10, 14]), host=st.sampled_from([10, 12, 40, None]))
    def make(self, num_slots: int, device: int, host: int | None) -> None:
        self.shelf = Shelf(num_slots, device, host)
        self.world = World(self.shelf, device)
        self.running: list[bytes] = []
        self.names = [bytes([i]) for i in range(6)]

    @rule(i=st.integers(0, 5), num_bytes=st.integers(1, 12))
    def add(self, i: int, num_bytes: int) -> None:
        num_bytes = self.world.sizes.setdefault(self.names[i], num_bytes)  # a digest has one size
        try:
            self.shelf.add(self.names[i], num_bytes)
        except ValueError:
            assert not self.shelf.has(self.names[i])

    @rule(i=st.integers(0, 5), is_pinned=st.booleans())
    def pin(self, i: int, is_pinned: bool) -> None:
        if not self.shelf.has(self.names[i]):
            return
        try:
            (self.shelf.pin if is_pinned else self.shelf.unpin)(self.names[i])
        except ValueError:
            assert is_pinned

    @rule(i=st.integers(0, 5))
    def remove(self, i: int) -> None:
        if self.shelf.has(self.names[i]):
            self.shelf.remove(self.names[i])

    @rule(queue=st.dictionaries(st.integers(0, 5), st.booleans()))
    def step(self, queue: dict[int, bool]) -> None:
        known = {self.names[i]: is_late for i, is_late in queue.items() if self.shelf.has(self.names[i])}
        self.shelf.look_over(known)
        self.world.carry_out()
        for digest in known:
            if self.world.take(digest) is not None:
                self.running.append(digest)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.running))
        self.running.remove(digest)
        self.shelf.give(digest)

    @precondition(lambda self: self.world.under_way)
    @rule(is_good=st.sampled_from([True, True, False]))
    def end(self, is_good: bool) -> None:
        order = self.world.under_way[0]
        self.world.end(is_good)
        is_lost = order.kind is OrderKind.READ and not is_good
        assert self.shelf.take_lost() == [order.digest] * is_lost

    @invariant()
    def holds(self) -> None:
        self.world.carry_out()
        self.shelf.check()
        for digest in self.running:
            assert digest in self.world.slots.values(), "an adapter in use was evicted"
        assert len(self.world.slots) == len(set(self.world.slots.values()))


ShelfMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestShelfMachine = ShelfMachine.TestCase


class Simulation:
    """60 sequences over 30 adapters and 3 slots, in steps; two adapters are wanted most of the time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shelf = Shelf(3, 18, self.rng.choice((16, 30, None)))
        self.world = World(self.shelf, 18)
        self.names = [bytes([i]) for i in range(30)]
        for name in self.names:
            self.world.sizes[name] = self.rng.randrange(1, 9)
            self.shelf.add(name, self.world.sizes[name])
        if seed % 2:
            self.shelf.pin(self.names[0])
        self.waiting = deque((0, self.any_name()) for _ in range(60))
        self.running: list[tuple[int, bytes]] = []
        self.longest = 0

    def any_name(self) -> bytes:
        return self.rng.choice(self.names[:2] if self.rng.random() < 0.8 else self.names)

    def run(self) -> int:
        """Returns the steps of the longest wait. The favourites keep coming for 1500 steps."""
        for step in range(6000):
            self.step(step)
            self.shelf.check()
            if not self.waiting and not self.running:
                return self.longest
        raise AssertionError(f"{len(self.waiting)} sequences wait for ever")

    def step(self, step: int) -> None:
        queue: dict[bytes, bool] = {}
        for since, digest in self.waiting:
            queue[digest] = queue.get(digest, False) or step - since > PATIENCE
        self.shelf.look_over(queue)
        self.world.carry_out()
        for since, digest in list(self.waiting):
            if len(self.running) < 8 and self.world.take(digest) is not None:
                self.waiting.remove((since, digest))
                self.longest = max(self.longest, step - since)
                self.running.append((step + self.rng.randrange(2, 12), digest))
        for end, digest in [one for one in self.running if one[0] <= step]:
            self.running.remove((end, digest))
            self.shelf.give(digest)
            if step < 1500:
                self.waiting.append((step, self.any_name()))
        if self.world.under_way and self.rng.random() < 0.7:
            self.world.end(self.world.under_way[0].kind is OrderKind.READ or self.rng.random() < 0.9)


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_gets_its_turn(seed: int) -> None:
    """Although two adapters are wanted all the time, none of the others waits for much longer than all turns take."""
    assert Simulation(seed).run() < 400


def idle_in_use(self: Entry) -> bool:
    return self.device is Copy.HERE and not self.is_pinned


def hold_uncounted(self: Shelf, digest: bytes) -> int:
    return self._entries[digest].slot


def ready_while_it_comes(self: Shelf, digest: bytes) -> bool:
    return self._entries[digest].device is not Copy.NONE


def no_turns(self: Shelf) -> None:
    self._turn = None


def a_turn_for_ever(self: Shelf) -> None:
    if self._turn is None:
        self._turn = next((one for one, is_late in self._queue.items() if is_late), None)


def a_load_that_failed_is_there(self: Shelf, order: Order, is_good: bool) -> None:
    ended(self, order, is_good=True)


def slots_alone_count(self: Shelf) -> int:
    return 0


def keep_the_slot(self: Shelf, entry: Entry) -> None:
    entry.slot, entry.device = -1, Copy.NONE


def hold_and_stay_fresh(self: Shelf, digest: bytes) -> int:
    slot = hold(self, digest)
    self._entries[digest].is_fresh = True
    return slot


hold, ended = Shelf.hold, Shelf.ended
BUGS: dict[str, tuple[type, str, object]] = {
    "evicts what runs": (Entry, "is_idle", property(idle_in_use)),
    "counts no reference": (Shelf, "hold", hold_uncounted),
    "computes before the load has ended": (Shelf, "is_ready", ready_while_it_comes),
    "nobody gets a turn": (Shelf, "_update_turn", no_turns),
    "a turn never ends": (Shelf, "_update_turn", a_turn_for_ever),
    "what ran counts as fresh": (Shelf, "hold", hold_and_stay_fresh),
    "a failed load counts": (Shelf, "ended", a_load_that_failed_is_there),
    "bytes are not counted": (Shelf, "_on_device", slots_alone_count),
    "a freed slot is lost": (Shelf, "_empty", keep_the_slot),
}


@pytest.mark.parametrize(("owner", "name", "bug"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_noticed(
    owner: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(12):
            assert Simulation(seed).run() < 400


def test_what_never_fits_is_refused() -> None:
    shelf = Shelf(2, 10, 8)
    shelf.add(b"a", 4)
    with pytest.raises(ValueError, match="11 bytes of an adapter and 0 of those pinned exceed 10"):
        shelf.add(b"b", 11)
    with pytest.raises(ValueError, match="9 bytes of an adapter exceed 8 in host memory"):
        shelf.add(b"b", 9)
    shelf.pin(b"a")
    with pytest.raises(ValueError, match="7 bytes of an adapter and 4 of those pinned exceed 10"):
        shelf.add(b"b", 7)
    shelf.add(b"b", 5)
    shelf.add(b"c", 1)
    with pytest.raises(ValueError, match=r"5 bytes|2 pinned adapters leave none of 2 slots"):
        shelf.pin(b"c")
    assert shelf.has(b"c") and OrderKind.FREE not in {one.kind for one in shelf.take_orders()}


def test_an_adapter_in_use_leaves_last() -> None:
    shelf = Shelf(1, 10, 10)
    world = World(shelf, 10)
    world.sizes[b"a"] = 4
    shelf.add(b"a", 4)
    for _ in range(2):
        shelf.look_over({b"a": False})
        world.carry_out()
        world.end()
    assert world.take(b"a") == 0
    shelf.remove(b"a")
    assert not shelf.has(b"a")
    assert world.take(b"a") is None
    assert shelf.take_orders() == []
    shelf.give(b"a")
    world.carry_out()
    assert (world.slots, world.host) == ({}, set())


def test_a_slot_whose_turn_has_ended_takes_no_new_sequences() -> None:
    shelf = Shelf(1, 10, 20)
    world = World(shelf, 10)
    for name in (b"a", b"b"):
        world.sizes[name] = 4
        shelf.add(name, 4)
    queue = {b"a": False, b"b": False}
    while world.take(b"a") is None:
        shelf.look_over(queue)
        world.carry_out()
        if world.under_way:
            world.end()
    shelf.look_over(queue)
    assert world.take(b"a") == 0, "nobody has waited for long"
    while world.under_way:
        world.end()
    shelf.look_over({b"a": False, b"b": True})
    assert world.take(b"a") is None
    shelf.give(b"a")
    shelf.look_over({b"b": True})
    assert world.slots == {0: b"a"}, "one more runs"
    shelf.give(b"a")
    shelf.look_over({b"a": False, b"b": True})
    world.carry_out()
    world.end()
    assert world.take(b"b") == 0
    shelf.look_over({b"b": False})
    assert world.take(b"b") == 0


def test_a_full_shelf_is_not_searched_for_every_waiting_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(8, 80, 160)
    names = [bytes([i]) for i in range(200)]
    for name in names:
        shelf.add(name, 10)
    queue = dict.fromkeys(names, False)
    for _ in range(4):
        shelf.look_over(queue)
        for order in shelf.take_orders():
            shelf.ended(order, is_good=True)
    searches: list[int] = []
    wanted_last = Shelf._wanted_last

    def search(self: Shelf) -> Iterator[bytes]:
        searches.append(1)
        return wanted_last(self)

    monkeypatch.setattr(Shelf, "_wanted_last", search)
    shelf.look_over(queue)
    assert 0 < len(searches) <= 3, "one search each of host memory and the device, and one of the turn"
