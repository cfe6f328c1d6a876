import asyncio
import itertools
from collections.abc import AsyncGenerator

from sluice_server.services.gateway.cache_events import MAX_KEPT, PART_BLOCKS, CacheBatch, CacheEvents
from sluice_server.services.messages.details import CachedBlock, Load
from sluice_server.services.messages.messages import CacheChanges, CacheQuery, Message, Report
from sluice_server.services.messages.work import pack_ids

Following = AsyncGenerator[CacheBatch | None, None]
LONG_S = 60.0


def block(name: bytes, parent: bytes = b"") -> CachedBlock:
    return CachedBlock(name, parent, "t", pack_ids([1, 2]))


A, B, C = block(b"a"), block(b"b", b"a"), block(b"c", b"b")


class Bench:
    """The events of engine e0, whose messages are numbered."""

    def __init__(self, wall_s: float = 1000.0) -> None:
        self.emitted: list[Message] = []
        self.now_s = 0.0
        self.events = CacheEvents("g0", self.emitted.append, lambda: self.now_s, lambda: wall_s)
        self._numbers = itertools.count()

    def tell(self, *added: CachedBlock, removed: tuple[bytes, ...] = (), whole: bool = False, epoch: int = 1) -> None:
        self.events.handle(CacheChanges("e0", epoch, next(self._numbers), whole, removed, added))

    def lose(self) -> None:
        next(self._numbers)

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
