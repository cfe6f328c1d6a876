"""What the engines' prefix caches hold, as a numbered stream for routers in front.

Numbers begin at the time of the start in microseconds, so that they never go back, over restarts too. A reader whose
number is not among those that are kept gets a snapshot: all blocks, in parts that end at the newest number. What an
engine reported is lost with a frame: then it is asked for all of it.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Set

import msgspec

from sluice_server.engine.kv_cache.log import parents_first
from sluice_server.services.messages.details import CachedBlock
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Report

MAX_KEPT = 1024  # batches
PART_BLOCKS = 512  # of a snapshot
ASK_AGAIN_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The place of a batch in a snapshot of `count` parts."""

    index: int
    count: int
    num_blocks: int  # in the whole snapshot


@dataclasses.dataclass(frozen=True, slots=True)
class CacheBatch:
    """Changes of one engine's cache. `is_whole`: nothing that was reported of this engine before holds.

    `union` says the same of the blocks that are held by any engine.
    """

    sequence: int
    engine_id: str
    is_whole: bool
    removed: tuple[CachedBlock, ...]
    added: tuple[CachedBlock, ...]
    union: "UnionChanges"
    snapshot: SnapshotPart | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class UnionChanges:
    """Changes of the blocks that are held by any engine. `is_whole`: nothing that was reported before holds."""

    is_whole: bool
    removed: tuple[CachedBlock, ...]  # the last copy is gone
    added: tuple[CachedBlock, ...]  # the first copy is there


@dataclasses.dataclass(slots=True)
class EngineContents:
    """The blocks of one engine. `expected`: number of its next message; None if its blocks are not known."""

    epoch: int = 0
    expected: int | None = None
    live: dict[bytes, CachedBlock] = dataclasses.field(default_factory=dict)


class CacheEvents:
    """The stream, and the contents that it adds up to."""

    def __init__(
        self,
        gateway_id: str,
        emit: Callable[[Message], None],
        clock: Callable[[], float],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._gateway_id = gateway_id
        self._emit = emit
        self._clock = clock
        self._sequence = int(wall_s() * 1e6)
        self._kept: deque[CacheBatch] = deque(maxlen=MAX_KEPT)
        self._engines: dict[str, EngineContents] = {}
        self._readers: set[asyncio.Event] = set()
        self._asked_s = clock() - ASK_AGAIN_S

    def handle(self, changes: CacheChanges) -> None:
        """Takes an engine's message; after a gap, none before one with all blocks."""
        contents = self._engines.setdefault(changes.engine_id, EngineContents())
        is_next = (changes.epoch, changes.number) == (contents.epoch, contents.expected)
        if not is_next and not changes.is_whole:
            contents.expected = None
            self._ask()
            return
        contents.epoch, contents.expected = changes.epoch, changes.number + 1
        self._change(changes.engine_id, changes.is_whole, changes.removed, changes.added)

    def take_report(self, report: Report) -> None:
        """Forgets the blocks of an engine that has started again; asks it for them while there are subscribers."""
        contents = self._engines.setdefault(report.engine_id, EngineContents(report.epoch))
        if contents.epoch != report.epoch:
            contents.epoch, contents.expected = report.epoch, None
            self._change(report.engine_id, True, (), ())
        if contents.expected is None and self._readers:
            self._ask()

    def lost(self, names: Set[str]) -> None:
        """Forgets the blocks of the engines among these processes, which have ended."""
        for name in sorted(names & self._engines.keys()):
            self._engines[name].expected = None
            if self._engines[name].live:
                self._change(name, True, (), ())

    def left(self, names: Set[str]) -> None:
        """Forgets engines that are no longer in the ring."""
        self.lost(names)
        for name in names:
            self._engines.pop(name, None)

    async def follow(self, start: int, beat_s: float) -> AsyncGenerator[CacheBatch | None, None]:
        """Yields the batches from the number `start` on, or a snapshot and those behind it; None after `beat_s` without
        one. Never ends."""
        news = asyncio.Event()
        self._readers.add(news)
        try:
            at = start
            while True:
                if not self._has(at):
                    for part in self._snapshot():
                        yield part
                        at = part.sequence + 1
                while self._has(at) and at <= self._sequence:
                    yield self._kept[at - self._kept[0].sequence]
                    at += 1
                if self._has(at) and not await _came(news, beat_s):
                    yield None
        finally:
            self._readers.discard(news)

    def _has(self, at: int) -> bool:
        """Whether a reader that wants the number `at` next misses nothing."""
        oldest = self._kept[0].sequence if self._kept else self._sequence + 1
        return oldest <= at <= self._sequence + 1

    def _snapshot(self) -> list[CacheBatch]:
        found: list[tuple[str, bool, tuple[CachedBlock, ...], tuple[CachedBlock, ...]]] = []
        told: set[bytes] = set()  # blocks of the engines before
        for engine_id, contents in sorted(self._engines.items()):
            blocks = tuple(parents_first(contents.live))
            for at in range(0, max(1, len(blocks)), PART_BLOCKS):
                part = blocks[at : at + PART_BLOCKS]
                found.append((engine_id, at == 0, part, tuple(one for one in part if one.name not in told)))
            told.update(contents.live)
        found = found or [("", True, (), ())]
        num_blocks, first = sum(len(part) for _, _, part, _ in found), self._sequence - len(found) + 1
        return [
            CacheBatch(
                *(first + at, engine_id, is_whole, (), part, UnionChanges(at == 0, (), added)),
                SnapshotPart(at, len(found), num_blocks),
            )
            for at, (engine_id, is_whole, part, added) in enumerate(found)
        ]

    def _change(self, engine_id: str, is_whole: bool, names: tuple[bytes, ...], added: tuple[CachedBlock, ...]) -> None:
        """Changes the blocks of an engine; of a whole change only `added` are left."""
        contents = self._engines[engine_id]
        live = contents.live
        gone = dict(live) if is_whole else {name: live[name] for name in names if name in live}
        for name in gone:
            del live[name]
        if is_whole and not any(one.live for one in self._engines.values()):
            union = UnionChanges(True, (), added)
        else:
            new = tuple(one for one in added if one.name not in gone and not self._is_held(one.name))
            kept = {one.name for one in added}
            left = tuple(one for name, one in gone.items() if name not in kept and not self._is_held(name))
            union = UnionChanges(False, left, new)
        live.update({block.name: block for block in added})
        self._sequence += 1
        removed = () if is_whole else tuple(gone.values())
        self._kept.append(CacheBatch(self._sequence, engine_id, is_whole, removed, added, union))
        for news in self._readers:
            news.set()

    def _is_held(self, name: bytes) -> bool:
        return any(name in one.live for one in self._engines.values())

    def _ask(self) -> None:
        now_s = self._clock()
        if now_s - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now_s
            self._emit(CacheQuery(self._gateway_id))


def names_only(changes: CacheChanges) -> CacheChanges:
    """Returns the changes with nothing but names, which is all that a router needs: no tokens, no tenants."""
    added = tuple(CachedBlock(block.name, b"", "", b"") for block in changes.added)
    return msgspec.structs.replace(changes, added=added)


async def _came(news: asyncio.Event, seconds: float) -> bool:
    """Waits for news, and whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    news.clear()
    return True
