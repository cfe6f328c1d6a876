"""Large requests: admitted one at a time, tenants in turn, small requests between them, and without starvation."""

import asyncio
from collections.abc import Callable, Generator

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.calls.large import MAX_REST_S, LargeRequestQueue
from sluice_server.services.gateway.contract.wire import LARGE


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def turns(loops: int) -> None:
    """Waits for that many turns of the loop."""
    for _ in range(loops):
        await asyncio.sleep(0)


async def read(lane: LargeRequestQueue, done: list[str], name: str, size: int = 1) -> None:
    async with lane.turn(name[0], size):
        done.append(name)


async def test_one_is_read_in_a_turn_of_the_loop_and_tenants_take_turns() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    names = ("a1", "a2", "a3", "b1", "b2", "c1")
    tasks = [asyncio.create_task(read(lane, done, name)) for name in names]
    counts = []
    while len(done) < len(names):
        await asyncio.sleep(0)
        counts.append(len(done))
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) == 1
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2"]
    await asyncio.gather(*tasks)


async def test_no_other_large_request_is_read_for_as_long_as_the_first_took() -> None:
    clock, done, due = Clock(), list[str](), list[tuple[float, Callable[[], None]]]()
    lane = LargeRequestQueue(clock, lambda *one: due.append(one))
    for took_s, rest_s in ((0.03, 0.03), (1e9, MAX_REST_S), (-1.0, 0.0)):  # bounded, whatever the clock says
        async with lane.turn("a", 1):
            clock.now_s += took_s
            waiting = asyncio.create_task(read(lane, done, "b"))
            await turns(1)
        await turns(9)
        assert not done and [round(wait_s, 6) for wait_s, _ in due] == [rest_s]
        due.pop()[1]()
        await waiting
        await turns(2)
        assert done.pop() == "b"
        due.pop()[1]()


async def test_who_gives_up_waits_no_more_and_passes_its_turn_on() -> None:
    lane, done = LargeRequestQueue(Clock(), max_bytes=10), list[str]()
    async with lane.turn("a", 1):
        tasks = [asyncio.create_task(read(lane, done, name, 10)) for name in ("b1", "c1", "d1")]
        await turns(1)
        tasks[1].cancel()
        await turns(1)
        again = asyncio.create_task(read(lane, done, "c2", 10))  # its bytes are free again
        await turns(1)
    while not done:
        await asyncio.sleep(0)
    tasks[2].cancel()  # in its turn, or before it
    await asyncio.gather(*tasks, again, return_exceptions=True)
    assert done in (["b1", "c2"], ["b1", "d1", "c2"])
    await read(lane, done, "e1")
    assert done[-1] == "e1"


async def test_a_turn_that_came_to_one_who_gave_up_is_passed_on() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    async with lane.turn("a", 1):
        second, third = (asyncio.create_task(read(lane, done, name)) for name in ("b1", "c1"))
        await turns(1)
        lane._next()  # between this and its waking
        second.cancel()
        async with asyncio.timeout(20):
            await third
    assert done == ["c1"] and second.cancelled()


async def test_more_bytes_of_one_tenant_are_refused_and_others_are_let_in() -> None:
    lane, done = LargeRequestQueue(Clock(), max_bytes=10), list[str]()
    async with lane.turn("a", 100):
        waiting = [asyncio.create_task(read(lane, done, name, size)) for name, size in (("a1", 100), ("b1", 4))]
        await turns(1)
        with pytest.raises(ServiceError) as refused:
            await read(lane, done, "a2", 1)
        waiting.append(asyncio.create_task(read(lane, done, "b2", 6)))
        await turns(1)
    assert (refused.value.reason, refused.value.retry_after_s) == ("QUEUE_FULL", 1.0)
    await asyncio.gather(*waiting)
    assert sorted(done) == ["a1", "b1", "b2"]


async def test_an_error_in_its_turn_ends_it() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    with pytest.raises(ValueError, match="broken"):
        async with lane.turn("a", 1):
            raise ValueError("broken")
    async with asyncio.timeout(20):
        await read(lane, done, "b1")
    assert done == ["b1"]


def in_slices(done: list[str], name: str, num: int = 3) -> Generator[None, None, str]:
    """Work in `num` slices, with its name as result."""
    for at in range(num):
        if at:
            yield
        done.append(f"{name}{at}")
    return name


async def test_work_of_a_large_request_is_done_in_slices_and_others_run_between_them() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    large = [asyncio.create_task(lane.run("t", LARGE + 1, in_slices(done, name))) for name in "ab"]
    counts = []
    while len(done) < 6:
        await asyncio.sleep(0)
        counts.append(len(done))
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) == 1
    assert done == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert await asyncio.gather(*large) == ["a", "b"]


async def test_work_of_a_small_request_waits_for_no_turn() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    async with lane.turn("t", 1):
        assert await lane.run("t", LARGE, in_slices(done, "a")) == "a"
    assert done == ["a0", "a1", "a2"]


async def test_a_request_that_is_given_up_between_slices_ends_its_turn() -> None:
    lane, done = LargeRequestQueue(Clock()), list[str]()
    task = asyncio.create_task(lane.run("t", LARGE + 1, in_slices(done, "a", 1000)))
    await turns(3)
    task.cancel()
    async with asyncio.timeout(20):
        assert await lane.run("t", LARGE + 1, in_slices(done, "b", 1)) == "b"
    assert task.cancelled() and 0 < len(done) < 1000 and done[-1] == "b0"
