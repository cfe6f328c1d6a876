"""The asyncio client against a real gateway, whose ring the test plays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
import sluice
from sluice.pool import Pool
from sluice.v1 import inference_pb2

from sluice_server.services.messages.messages import Append, Grant, Submit
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.fake_ring import Rig, generation, running, settings, text_of

QUICK = sluice.RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)


@contextlib.asynccontextmanager
async def client_of(*rigs: Rig, retry: sluice.RetryPolicy = QUICK) -> AsyncIterator[sluice.AsyncClient]:
    async with sluice.AsyncClient([f"127.0.0.1:{rig.port}" for rig in rigs], retry=retry) as client:
        yield client


async def test_generate_and_stream_say_the_same() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        answer = await client.generate("hello", max_tokens=3)
        stream = client.stream("hello", max_tokens=3)
        assert await stream.text() == answer.text == "abc"
        assert answer.finish_reason == "length" and answer.token_ids == [0, 1, 2]
        assert stream.progress.finished is not None and stream.num_broken == 0


async def test_leaving_the_loop_cancels_the_generation() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        async with contextlib.aclosing(aiter(client.stream("hello"))) as deltas:
            async for delta in deltas:
                assert delta.text == "a"
                break
        await rig.ring.until(lambda: rig.ring.cancels)


async def test_cancel_ends_the_stream_of_every_reader() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        stream = client.stream("hello")
        with pytest.raises(sluice.Cancelled):
            async for _ in stream:
                await stream.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)


async def test_cancel_of_a_detached_generation_reaches_its_server() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        stream = client.stream("hello", detach=True)
        with pytest.raises(sluice.Cancelled):
            async for _ in stream:
                await stream.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)


def splits(rig: Rig, begin: Sequence[str], rest: Sequence[str]) -> None:
    """Lets a gateway begin what is new, and end what another one began."""

    def play(submit: Submit) -> None:
        first = len(begin) if submit.resume else 0
        words = rest if submit.resume else begin
        is_last = bool(submit.resume)
        for at, word in enumerate(words):
            rig.ring.play(
                text_of(submit, first + at, word, first=not at, last=is_last and at == len(words) - 1),
            )

    rig.ring.script = play


async def test_a_gateway_that_stops_is_followed_by_the_next_with_what_was_received() -> None:
    async with running() as first, running(settings(gateway_id="g1")) as second, client_of(first, second) as client:
        for rig in (first, second):
            splits(rig, "ab", "cd")
        stream, texts = client.stream("hello", seed=5), []
        async for delta in stream:
            texts.append((delta.seq, delta.text))
            if "".join(text for _, text in texts) == "ab":
                (rig,) = (one for one in (first, second) if one.ring.submits)
                await rig.gateway.stop(0.0)
        assert "".join(text for _, text in texts) == "abcd"
        assert [seq for seq, _ in texts] == sorted({seq for seq, _ in texts}) and stream.num_broken == 1
        (other,) = (one for one in (first, second) if one is not rig)
        assert other.ring.submits[0].resume == (pack_ids([0, 1]),)


async def test_a_generation_of_a_session_goes_on_elsewhere_too() -> None:
    async with running() as first, running(settings(gateway_id="g1")) as second, client_of(first, second) as client:
        for rig in (first, second):
            splits(rig, "a", "b")
        async with client.converse() as session:
            opened = session.open("hello", seed=5)
            texts = []
            async for delta in opened:
                texts.append(delta.text)
                if texts == ["a"]:
                    (rig,) = (one for one in (first, second) if one.ring.submits)
                    await rig.gateway.stop(0.0)
            assert texts == ["a", "b"] and opened.num_broken == 1


async def test_a_session_has_many_generations_and_each_its_end() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        async with client.converse() as session:
            await session.ping()
            opened = [session.open("hello", max_tokens=2) for _ in range(5)]
            assert await asyncio.gather(*(one.text() for one in opened)) == ["ab"] * 5
            with pytest.raises(sluice.InvalidArgument) as caught:
                await session.open("hello", max_tokens=10**6).text()
            assert caught.value.violations[0].field == "max_tokens"


async def test_credit_goes_back_as_the_reader_takes() -> None:
    async with running() as rig, client_of(rig) as client:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True), text_of(submit, 1, "b"))
        async with client.converse() as session:
            reading = asyncio.create_task(session.open("hello", max_tokens=8, window=4).text())
            await rig.ring.until(lambda: any(isinstance(message, Grant) for message in rig.ring.emitted))
            rig.ring.play(text_of(rig.ring.submits[0], 2, "c", last=True))
            assert await reading == "abc"
        assert [message.tokens for message in rig.ring.emitted if isinstance(message, Grant)] == [2]


async def test_what_is_refused_while_the_door_is_full_is_asked_for_again() -> None:
    async with running(settings(max_open_requests=1)) as rig, client_of(rig) as client:
        held = client.stream("hello")
        deltas = aiter(held)
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        await anext(deltas)
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["x"]))
        async with sluice.AsyncClient(f"127.0.0.1:{rig.port}", retry=sluice.NEVER) as hasty:
            with pytest.raises(sluice.ResourceExhausted) as caught:
                await hasty.generate("hello")
        assert caught.value.retry_after_s and caught.value.reason == "QUEUE_FULL"
        asked = asyncio.create_task(client.generate("hello"))
        await deltas.aclose()
        assert (await asked).text == "x"


async def test_load_is_watched_until_the_loop_is_left() -> None:
    async with running() as rig, client_of(rig) as client, contextlib.aclosing(client.watch_load(0.1)) as loads:
        assert [(await anext(loads)).open_requests for _ in range(2)] == [0, 0]


async def test_no_server_is_said_after_a_few_attempts() -> None:
    async with sluice.AsyncClient("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(sluice.Unavailable):
            await client.generate("hello")
        with pytest.raises(sluice.Unavailable):
            await client.stream("hello").text()


async def test_deadlines_hold_for_all_attempts() -> None:
    async with running() as rig, client_of(rig) as client:
        with pytest.raises(sluice.DeadlineExceeded):
            await client.generate("hello", timeout_s=0.05)
        with pytest.raises(sluice.DeadlineExceeded):
            await client.stream("hello", timeout_s=0.05).text()


async def test_an_input_that_stays_open_is_completed_in_pieces() -> None:
    async with running() as rig, client_of(rig) as client, client.converse() as session:
        opened = session.open("hel", keep_input_open=True)
        opened.append("lo")
        opened.update(inference_pb2.Update(max_tokens=5))
        opened.close_input()
        await rig.ring.until(lambda: any(isinstance(message, Append) for message in rig.ring.emitted))
        await opened.cancel()
        with pytest.raises(sluice.Cancelled):
            await opened.text()


def test_the_pool_opens_lines_as_calls_overlap_and_avoids_the_one_that_failed() -> None:
    opened: list[tuple[str, int]] = []

    def open_line(target: str, number: int) -> int:
        opened.append((target, number))
        return number

    pool = Pool(open_line, ["a"], 3)
    first = pool.lease()
    pool.release(first)
    assert pool.lease() is first and opened == [("a", 0)]
    second = pool.lease()
    assert second is not first and opened[-1] == ("a", 1)
    pool.release(second)
    third = pool.lease(avoid=second)
    assert third not in (first, second) and opened[-1] == ("a", 2)
    assert pool.lease(avoid=second) in (first, third) and pool.lease() is second
    assert pool.lines() == [0, 1, 2]


def test_a_call_that_failed_goes_to_another_address_unless_it_must_stay() -> None:
    lost = sluice.Unavailable("x")
    pool = Pool(lambda target, number: (target, number), ["a", "b"], 4)
    first = pool.lease()
    assert pool.failed(first.address, lost)
    assert pool.lease(first).address != first.address
    again = pool.lease(first, stay=True)
    assert again.address == first.address and again is not first
    assert not pool.failed(1 - first.address, lost)
