"""The index against the radix tree of another project: Dynamo's, in a process of its own.

The tree holds every block behind the one before it, so the caches here evict the ends of prefixes first. What a reader
may believe after loss, repetition and reordering is in the books of `test_index_storm`; what prefixes engines then have
in common with a prompt is the tree's answer.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_server.services.routing.index import CacheIndex
from tests.services.routing.test_index_storm import ENGINES, Credulous, Forgetful, Known, Told, name

DYNAMO = Path(os.environ.get("DYNAMO_PYTHON", Path(sys.prefix) / "dynamo/bin/python"))
NUM_NAMES = 300
BEFORE = [
    None if at < 3 else random.Random(at).randrange(at) for at in range(NUM_NAMES)
]  # of each block, in its prefix

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DYNAMO.exists(), reason="Dynamo's RadixTree is not here: make test-radix installs it"),
]


def prefix_of(block: int) -> list[int]:
    """The blocks of the prefix that ends with this one."""
    found: list[int] = []
    at: int | None = block
    while at is not None:
        found.append(at)
        at = BEFORE[at]
    return found[::-1]


class Teller:
    """An engine's cache, in which no block is without those before it, and the reports that have not arrived."""

    def __init__(self) -> None:
        self.epoch, self.number = 1, 0
        self.holds: set[int] = set()
        self.way: list[Told] = []

    def restart(self) -> None:
        self.epoch, self.number, self.holds = self.epoch + 1, 0, set()

    def change(self, rng: random.Random) -> None:
        gone = []
        for _ in range(rng.randrange(6)):
            ends = sorted(self.holds - {BEFORE[at] for at in self.holds})
            if ends:
                gone.append(rng.choice(ends))
                self.holds.remove(gone[-1])
        new = [at for at in prefix_of(rng.randrange(NUM_NAMES)) if at not in self.holds]
        self.holds |= set(new)
        self._tell(gone, new, is_whole=False)

    def tell_all(self) -> None:
        self._tell([], sorted(self.holds), is_whole=True)

    def _tell(self, gone: list[int], new: list[int], *, is_whole: bool) -> None:
        removed, added = tuple(map(name, gone)), tuple(map(name, new))
        self.way.append(Told(self.epoch, self.number, removed, added, is_whole, frozenset(map(name, self.holds))))
        self.number += 1


class Played:
    """A history, played with an index: what it answered, and the commands from which a tree answers the same."""

    def __init__(self, index: CacheIndex, seed: int) -> None:
        self.commands: list[object] = []
        self.answers: list[dict[str, int]] = []
        self._index = index
        self._rng = random.Random(seed)
        self._tellers = {engine: Teller() for engine in ENGINES}
        self._books = {engine: Known() for engine in ENGINES}

    def event(self) -> None:
        """Plays one event, and asks for a prompt's engines."""
        rng = self._rng
        engine = rng.choice(ENGINES)
        teller = self._tellers[engine]
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
                self._arrive(engine, teller.way.pop(0))
        prompt = prefix_of(rng.randrange(NUM_NAMES))
        self.answers.append(self._index.matched([name(at) for at in prompt], ENGINES))
        self.commands.append(["match", [at + 1 for at in prompt]])

    def _arrive(self, engine: str, told: Told) -> None:
        before = self._books[engine].next
        is_taken = self._books[engine].take(told)
        self._index.report(engine, told.epoch, told.number, told.removed, told.added, is_whole=told.is_whole)
        if not is_taken:
            self._tellers[engine].tell_all()
        number, at = ENGINES.index(engine), (told.epoch, told.number)
        if (told.is_whole and (before is None or at >= before)) or not is_taken:
            self.commands.append(["forget", number])
        if before == at or (told.is_whole and (before is None or at > before)):
            self._apply(number, told)

    def _apply(self, number: int, told: Told) -> None:
        if told.removed:
            self.commands.append(["remove", number, [int.from_bytes(one, "big") + 1 for one in told.removed]])
        for one in told.added:
            block = int.from_bytes(one, "big")
            before = BEFORE[block]
            self.commands.append(["store", number, None if before is None else before + 1, [block + 1]])


def play(index: CacheIndex, seed: int, num_events: int) -> int:
    """Plays random events and compares all answers with the tree's; returns how many found something held."""
    played = Played(index, seed)
    for _ in range(num_events):
        played.event()
    said = "".join(json.dumps(command) + "\n" for command in played.commands)
    script = Path(__file__).with_name("radix_tree.py")
    run = subprocess.run([DYNAMO, script], input=said, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [{ENGINES[int(at)]: num for at, num in json.loads(line).items()} for line in run.stdout.splitlines()]
    assert len(found) == len(played.answers)
    for at, (ours, theirs) in enumerate(zip(played.answers, found, strict=True)):
        assert ours == dict.fromkeys(ENGINES, 0) | theirs, f"prompt {at}"
    return sum(any(answer.values()) for answer in found)


def test_it_finds_the_prefixes_that_a_radix_tree_finds() -> None:
    assert play(CacheIndex(ENGINES), 1, 100_000) > 50_000


@pytest.mark.parametrize("planted", [Credulous, Forgetful])
def test_planted_bugs_are_found(planted: type[CacheIndex]) -> None:
    with pytest.raises(AssertionError, match="prompt"):
        play(planted(ENGINES), 1, 10_000)
