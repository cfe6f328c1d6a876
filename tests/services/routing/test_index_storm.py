"""The index against independent books, through links that lose, repeat and reorder reports, and engines that restart.

The books know what every engine holds and which reports have arrived; they share no code with the index.
"""

import dataclasses
import random

import pytest

from sluice_server.services.routing.index import CacheIndex

ENGINES = ("e0", "e1", "e2", "e3")
NUM_NAMES = 80


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclasses.dataclass(frozen=True)
class Told:
    """One report on the way: what it changes, and what its engine then holds."""

    epoch: int
    number: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]
    is_whole: bool
    holds: frozenset[bytes]


class Teller:
    """An engine's cache, and the reports of it that have not arrived."""

    def __init__(self) -> None:
        self.epoch, self.number = 1, 0
        self.holds: set[bytes] = set()
        self.way: list[Told] = []

    def restart(self) -> None:
        """The process is another one, with an empty cache; reports of the earlier one may be on the way."""
        self.epoch, self.number, self.holds = self.epoch + 1, 0, set()

    def change(self, rng: random.Random) -> None:
        gone = rng.sample(sorted(self.holds), min(len(self.holds), rng.randrange(3)))
        new = [name(rng.randrange(NUM_NAMES)) for _ in range(rng.randrange(4))]
        self.holds = (self.holds - set(gone)) | set(new)
        self._tell(tuple(gone), tuple(new), is_whole=False)

    def tell_all(self) -> None:
        self._tell((), tuple(sorted(self.holds)), is_whole=True)

    def _tell(self, removed: tuple[bytes, ...], added: tuple[bytes, ...], *, is_whole: bool) -> None:
        self.way.append(Told(self.epoch, self.number, removed, added, is_whole, frozenset(self.holds)))
        self.number += 1


@dataclasses.dataclass
class Known:
    """What a reader that believes an engine only in order may know of it."""

    next: tuple[int, int] | None = None
    holds: frozenset[bytes] = frozenset()

    def take(self, told: Told) -> bool:
        """Returns whether the engine need not be asked."""
        at = (told.epoch, told.number)
        if self.next is not None and at < self.next:
            return True
        if not told.is_whole and at != self.next:
            self.next, self.holds = None, frozenset()
            return False
        self.next, self.holds = (told.epoch, told.number + 1), told.holds
        return True


def leading(names: list[bytes], holds: frozenset[bytes]) -> int:
    num = 0
    while num < len(names) and names[num] in holds:
        num += 1
    return num


def storm(index: CacheIndex, seed: int, num_events: int) -> int:
    """Plays random events, compares after each; returns how many comparisons found something held."""
    rng = random.Random(seed)
    tellers = {engine: Teller() for engine in ENGINES}
    books = {engine: Known() for engine in ENGINES}
    found = 0
    for _ in range(num_events):
        engine = rng.choice(ENGINES)
        teller = tellers[engine]
        match rng.choices(("change", "arrive", "lose", "repeat", "swap", "restart"), (40, 50, 1, 2, 0.5, 0.3))[0]:
            case "change":
                teller.change(rng)
            case "restart":
                teller.restart()
            case "lose" if teller.way:
                teller.way.pop(rng.randrange(len(teller.way)))
            case "repeat" if teller.way:
                teller.way.insert(rng.randrange(len(teller.way) + 1), rng.choice(teller.way))
            case "swap" if len(teller.way) > 1:
                at = rng.randrange(len(teller.way) - 1)
                teller.way[at], teller.way[at + 1] = teller.way[at + 1], teller.way[at]
            case "arrive" if teller.way:
                told = teller.way.pop(0)
                where = engine, told.epoch, told.number
                is_taken = index.report(*where, told.removed, told.added, is_whole=told.is_whole)
                assert is_taken == books[engine].take(told)
                if not is_taken:
                    teller.tell_all()  # as a tokenizer asks
        names = [name(at) for at in rng.sample(range(NUM_NAMES), 4)]
        matched = index.matched(names, ENGINES)
        assert matched == {one: leading(names, books[one].holds) for one in ENGINES}
        assert [index.knows(one) for one in ENGINES] == [books[one].next is not None for one in ENGINES]
        found += any(matched.values())
    return found


def test_it_knows_what_a_reader_can_know() -> None:
    assert storm(CacheIndex(ENGINES), 1, 100_000) > 25_000


class Credulous(CacheIndex):
    """Takes what comes, in whatever order."""

    def report(self, engine: str, epoch: int, number: int, *rest: object, **how: bool) -> bool:  # type: ignore[override]
        self._next[engine] = (epoch, number)
        return super().report(engine, epoch, number, *rest, **how)  # type: ignore[arg-type]


class Forgetful(CacheIndex):
    """Keeps after a gap what an engine held before."""

    def forget(self, engine: str) -> None:
        self._next.pop(engine, None)


@pytest.mark.parametrize("planted", [Credulous, Forgetful])
def test_planted_bugs_are_found(planted: type[CacheIndex]) -> None:
    with pytest.raises(AssertionError):
        storm(planted(ENGINES), 1, 10_000)
