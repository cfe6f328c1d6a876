"""Clients of several services: where their calls go, against real gateways whose rings the test plays."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest
import sluice

from tests.clients.test_sdk_async import splits
from tests.conformance.proxy import holding
from tests.services.gateway.fake_ring import Rig, generation, running, settings, text_of

QUICK = sluice.RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)


@contextlib.asynccontextmanager
async def cells(first_limit: int = 100) -> AsyncIterator[tuple[Rig, Rig, sluice.AsyncClient]]:
    """Two services and a client of both. The first one takes `first_limit` requests at once."""
    async with (
        running(settings(max_open_requests=first_limit)) as first,
        running(settings(gateway_id="g1")) as second,
        sluice.AsyncClient(addresses(first, second), retry=QUICK) as client,
    ):
        yield first, second, client


def addresses(*rigs: Rig) -> list[str]:
    return [f"127.0.0.1:{rig.port}" for rig in rigs]


def answers(rig: Rig, word: str) -> None:
    rig.ring.script = lambda submit: rig.ring.play(*generation(submit, [word]))


@contextlib.asynccontextmanager
async def held(rig: Rig, num: int) -> AsyncIterator[None]:
    """Requests that are open at a service, from another client."""
    rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
    async with sluice.AsyncClient(addresses(rig)) as other, contextlib.AsyncExitStack() as stack:
        for _ in range(num):
            deltas = await stack.enter_async_context(contextlib.aclosing(aiter(other.stream("hello"))))
            await anext(deltas)
        yield


def has_reports(client: sluice.AsyncClient) -> bool:
    return all(one.reported_s > 0 for one in client._pool._balance._addresses)


async def test_calls_go_where_fewer_requests_are_open() -> None:
    """Fewer also with those that were sent there since it told how many, which may be four."""
    async with cells() as (first, second, client), held(first, 5):
        answers(first, "first")
        answers(second, "second")
        await client.generate("hello")  # begins to watch
        await first.ring.until(lambda: has_reports(client))
        assert [(await client.generate("hello")).text for _ in range(3)] == ["second"] * 3


async def test_what_one_refuses_as_it_is_full_the_other_answers_at_once() -> None:
    """The first one says to wait a second; the deadline does not allow that."""
    async with cells(first_limit=1) as (first, second, client), held(first, 1):
        answers(second, "second")
        found = await asyncio.gather(*(client.generate("hello", timeout_s=0.9) for _ in range(8)))
        assert [one.text for one in found] == ["second"] * 8


async def test_a_generation_is_cancelled_by_its_id_at_the_service_that_has_it() -> None:
    async with cells() as (_, second, client):
        second.ring.script = lambda submit: second.ring.play(text_of(submit, 0, "a", first=True))
        async with sluice.AsyncClient(addresses(second)) as other:
            stream = other.stream("hello")
            deltas = aiter(stream)
            await anext(deltas)
            assert stream.progress.accepted is not None
            await client.cancel(stream.progress.accepted.generation_id)
            with pytest.raises(sluice.Cancelled):
                await asyncio.wait_for(anext(deltas), 20)
            await client.cancel(stream.progress.accepted.generation_id)  # it has ended


@pytest.mark.long
async def test_a_service_that_stops_without_a_word_is_left_within_seconds() -> None:
    """Its connection stays open and carries nothing. A stream that is silent for long is not taken for that."""
    async with running() as first, running(settings(gateway_id="g1")) as second:
        for rig in (first, second):
            splits(rig, "a", "b")
        with holding(f"127.0.0.1:{first.port}", 1500) as proxy:  # of loads, after some ten seconds
            async with sluice.AsyncClient([proxy.address, *addresses(second)], channels=2) as client:
                deltas = None
                while not first.ring.submits:
                    deltas = aiter(client.stream("hello"))
                    await anext(deltas)
                assert deltas is not None and await asyncio.to_thread(proxy.harmed.wait, 60)
                assert (await asyncio.wait_for(anext(deltas), 30)).text == "b"


async def test_the_threads_that_read_loads_end_with_the_blocking_client() -> None:
    def ask(targets: list[str]) -> list[str]:
        with sluice.Client(targets, retry=QUICK) as client:
            texts = [client.generate("hello").text for _ in range(4)]
            assert sum(one.name == "sluice-load" for one in threading.enumerate()) == 2
            client.cancel("unknown")
        assert not any(one.name == "sluice-load" for one in threading.enumerate())
        return texts

    async with cells() as (first, second, _):
        answers(first, "x")
        answers(second, "x")
        assert await asyncio.to_thread(ask, addresses(first, second)) == ["x"] * 4


async def test_a_program_ends_that_has_not_closed_its_client() -> None:
    async with cells() as (first, second, _):
        answers(first, "x")
        answers(second, "x")
        program = f"import sluice\nclient = sluice.Client({addresses(first, second)})\nprint(client.generate('a').text)"
        command = [sys.executable, "-c", program]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")
