import asyncio
import collections
import itertools
import random
from collections.abc import AsyncGenerator, Iterator

from sluice_server.services.gateway.cache_events import MAX_KEPT, PART_BLOCKS, CacheBatch, CacheEvents
from sluice_server.services.messages.details import CachedBlock, Load
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Report
from sluice_server.services.messages.work import pack_ids

Following = AsyncGenerator[CacheBatch | None, None]
LONG_S = 60.0


def block(name: bytes, parent: bytes = b"") -> CachedBlock:
    return CachedBlock(name, parent, "t", pack_ids([1, 2]))


A, B, C = block(b"a"), block(b"b", b"a"), block(b"c", b"b")


class Bench:
    """The events of engines whose messages are numbered."""

    def __init__(self, wall_s: float = 1000.0) -> None:
        self.emitted: list[Message] = []
        self.now_s = 0.0
        self.events = CacheEvents("g0", self.emitted.append, lambda: self.now_s, lambda: wall_s)
        self._numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

    def tell(
        self,
        *added: CachedBlock,
        removed: tuple[bytes, ...] = (),
        whole: bool = False,
        epoch: int = 1,
        engine: str = "e0",
    ) -> None:
        self.events.handle(CacheChanges(engine, epoch, next(self._numbers[engine]), whole, removed, added))

    def lose(self) -> None:
        next(self._numbers["e0"])

    def report(self, epoch: int = 1) -> None:
        self.events.take_report(Report("e0", epoch, Load(), served_token=True))

    @property
    def queries(self) -> int:
        return sum(isinstance(one, CacheQuery) for one in self.emitted)


async def taken(following: Following) -> CacheBatch:
    batch = await anext(following)
    assert batch is not None
    return batch


async def test_a_new_reader_gets_a_snapshot_and_then_what_changes() -> None:
    bench = Bench()
    bench.tell(A, B, whole=True)
    bench.tell(C, removed=(b"a",))
    following = bench.events.follow(0, LONG_S)
    first = await taken(following)
    assert first.snapshot is not None and (first.snapshot.count, first.snapshot.num_blocks) == (1, 2)
    assert (first.is_whole, first.added) == (True, (B, C))
    bench.tell(A)  # its parent comes after it: the snapshot of a later reader puts it first
    second = await taken(following)
    assert (second.sequence, second.added, second.removed, second.snapshot) == (first.sequence + 1, (A,), (), None)
    bench.tell(removed=(b"a",))
    assert (await taken(following)).removed == (A,)
    bench.tell(A)
    assert (await taken(bench.events.follow(0, LONG_S))).added == (A, B, C)


async def test_a_reader_goes_on_where_it_was_or_gets_a_snapshot_if_that_is_gone() -> None:
    bench = Bench()
    bench.tell(whole=True)
    bench.tell(A)
    bench.tell(B)
    newest = (await taken(bench.events.follow(0, LONG_S))).sequence
    assert (await taken(bench.events.follow(newest, LONG_S))).added == (B,)
    for foreign in (1, newest + 2, newest - 3):
        assert (await taken(bench.events.follow(foreign, LONG_S))).snapshot is not None
    waiting = bench.events.follow(newest + 1, 0.0)
    assert await anext(waiting) is None  # nothing is new
    for _ in range(MAX_KEPT + 1):
        bench.tell()
    assert (await taken(waiting)).snapshot is not None  # it was too slow


async def test_numbers_go_up_over_a_restart() -> None:
    before, after = Bench(wall_s=1000.0), Bench(wall_s=1001.0)
    for bench in (before, after):
        bench.tell(whole=True)
    old, new = [(await taken(bench.events.follow(0, LONG_S))).sequence for bench in (before, after)]
    assert new - old == 1_000_000


async def test_a_lost_message_makes_the_engine_tell_all() -> None:
    bench = Bench()
    bench.tell(A, whole=True)
    bench.lose()
    bench.tell(C)
    assert bench.queries == 1
    bench.tell(C)
    assert bench.queries == 1  # not at once again
    bench.now_s = 2.0
    bench.tell(C)
    assert bench.queries == 2
    bench.tell(A, B, C, whole=True)
    assert (await taken(bench.events.follow(0, LONG_S))).added == (A, B, C)


async def test_a_restarted_engine_has_nothing() -> None:
    bench = Bench()
    bench.tell(A, whole=True)
    following = bench.events.follow(0, LONG_S)
    await taken(following)
    bench.report(epoch=1)
    bench.report(epoch=2)
    batch = await taken(following)
    assert batch.is_whole and not batch.added
    assert bench.queries == 1  # somebody reads


async def test_an_unknown_cache_is_asked_for_while_somebody_reads() -> None:
    bench = Bench()
    bench.report()
    assert bench.queries == 0
    following = bench.events.follow(0, LONG_S)
    assert (await taken(following)).added == ()
    bench.report()
    assert bench.queries == 1
    await following.aclose()
    bench.now_s = 5.0
    bench.report()
    assert bench.queries == 1


async def test_a_large_cache_comes_in_parts_with_numbers_up_to_the_newest() -> None:
    bench = Bench()
    bench.tell(whole=True)
    bench.tell(*[block(str(at).encode()) for at in range(PART_BLOCKS + 1)])
    following = bench.events.follow(0, LONG_S)
    parts = [await taken(following) for _ in range(2)]
    assert [len(part.added) for part in parts] == [PART_BLOCKS, 1]
    assert [part.is_whole for part in parts] == [True, False]
    assert parts[1].sequence == parts[0].sequence + 1
    bench.tell(A)
    assert (await taken(following)).sequence == parts[1].sequence + 1


async def test_readers_wait_for_each_other_in_nothing() -> None:
    bench = Bench()
    bench.tell(whole=True)
    both = [bench.events.follow(0, LONG_S) for _ in range(2)]
    for following in both:
        await taken(following)
    waiting = [asyncio.create_task(taken(following)) for following in both]
    await asyncio.sleep(0)
    bench.tell(A)
    assert [(await one).added for one in waiting] == [(A,), (A,)]


async def test_a_block_is_held_until_the_last_engine_drops_it() -> None:
    bench = Bench()
    bench.tell(A, whole=True)
    following = bench.events.follow(0, LONG_S)
    await taken(following)
    bench.tell(A, B, whole=True, engine="e1")
    second = await taken(following)
    assert (second.engine_id, second.is_whole, second.added) == ("e1", True, (A, B))
    assert (second.union.is_whole, second.union.removed, second.union.added) == (False, (), (B,))
    bench.tell(C, removed=(b"a",))
    third = await taken(following)
    assert (third.engine_id, third.removed, third.added) == ("e0", (A,), (C,))
    assert (third.union.removed, third.union.added) == ((), (C,))
    bench.tell(removed=(b"a",), engine="e1")
    assert (await taken(following)).union.removed == (A,)


async def test_the_blocks_of_a_lost_engine_are_gone_at_once_and_come_back_when_it_tells_all() -> None:
    bench = Bench()
    bench.tell(A, whole=True)
    bench.tell(A, B, whole=True, engine="e1")
    following = bench.events.follow(0, LONG_S)
    parts = [await taken(following) for _ in range(2)]
    assert [(part.engine_id, part.is_whole, part.added) for part in parts] == [("e0", True, (A,)), ("e1", True, (A, B))]
    assert [(part.union.is_whole, part.union.added) for part in parts] == [(True, (A,)), (False, (B,))]
    bench.events.lost({"e1", "t0"})
    batch = await taken(following)
    assert (batch.engine_id, batch.is_whole, batch.added) == ("e1", True, ())
    assert (batch.union.is_whole, batch.union.removed) == (False, (B,))
    assert batch.sequence == parts[1].sequence + 1
    bench.tell(C, engine="e1")  # sent before it ended
    bench.tell(B, whole=True, epoch=2, engine="e1")
    assert (await taken(following)).union.added == (B,)
    bench.events.lost({"e0", "e1"})
    assert [(await taken(following)).union.is_whole for _ in range(2)] == [False, True]


async def test_whatever_happens_readers_know_what_each_engine_holds_and_what_any_holds() -> None:
    rng, bench = random.Random(7), Bench()
    held: dict[str, set[bytes]] = {"e0": set(), "e1": set(), "e2": set()}
    for engine in held:
        bench.tell(whole=True, engine=engine)
    following = bench.events.follow(0, LONG_S)
    seen: dict[str, set[bytes]] = {engine: set() for engine in held}
    union: set[bytes] = set()
    for _ in held:
        await taken(following)
    for _ in range(400):
        engine, names = rng.choice(sorted(held)), [bytes([at]) for at in rng.sample(range(8), 3)]
        is_whole = rng.random() < 0.3
        removed = () if is_whole else tuple(name for name in names if name in held[engine])
        added = tuple(block(name) for name in names if is_whole or name not in held[engine])
        held[engine] = (set() if is_whole else held[engine] - set(removed)) | {one.name for one in added}
        bench.tell(*added, removed=removed, whole=is_whole, engine=engine)
        batch = await taken(following)
        seen[engine] = set() if batch.is_whole else seen[engine] - {one.name for one in batch.removed}
        seen[engine] |= {one.name for one in batch.added}
        gone, new = {one.name for one in batch.union.removed}, {one.name for one in batch.union.added}
        union = set() if batch.union.is_whole else union
        assert gone <= union and not new & union
        union = union - gone | new
        assert seen == held and union == set().union(*held.values())
