"""The writer of a stream's events: in order, one at a time, driven by news and by the transport."""

import asyncio
from collections import deque

import pytest

from sluice_server.engine.errors import ServiceError, stage_lost
from sluice_server.services.gateway.generation.events import PongEvent, StreamEvent
from sluice_server.services.gateway.generation.writing import EventWriter


class Events:
    """A source of numbered events; `last` ends it."""

    def __init__(self, *numbers: int, last: int = 9) -> None:
        self.waiting = deque(numbers)
        self.last = last
        self.is_over = False
        self.error: ServiceError | None = None

    def next(self) -> StreamEvent | None:
        if self.error is not None:
            raise self.error
        if not self.waiting:
            return None
        number = self.waiting.popleft()
        self.is_over = number == self.last
        return PongEvent(number)  # type: ignore[return-value] # any event will do


class Transport:
    """Takes events, each when it is told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.written: list[int] = []
        self.free = asyncio.Event()

    async def write(self, event: StreamEvent) -> None:
        assert isinstance(event, PongEvent)
        self.begun.append(event.nonce)
        await self.free.wait()
        await asyncio.sleep(0)
        self.written.append(event.nonce)


async def turns(num: int = 6) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_events_are_written_one_at_a_time_and_news_during_a_write_is_not_lost() -> None:
    events, transport = Events(1), Transport()
    writer = EventWriter(events, transport.write)
    running = asyncio.create_task(writer.run())
    await turns()
    assert transport.begun == [1] and not running.done()
    events.waiting.extend([2, 9])
    writer.wake()
    await turns()
    assert transport.begun == [1]
    transport.free.set()
    await running
    assert transport.written == [1, 2, 9]


async def test_a_writer_that_waits_for_news_is_woken() -> None:
    events, transport = Events(), Transport()
    transport.free.set()
    writer = EventWriter(events, transport.write)
    running = asyncio.create_task(writer.run())
    for number in (1, 2):
        await turns()
        events.waiting.append(number)
        writer.wake()
        writer.wake()
        await turns()
        assert transport.written[-1] == number
    events.waiting.append(9)
    writer.wake()
    await running


async def test_a_write_that_never_waits_is_followed_by_the_next() -> None:
    written: list[StreamEvent] = []

    async def write(event: StreamEvent) -> None:
        written.append(event)

    await EventWriter(Events(1, 2, 9), write).run()
    assert len(written) == 3


async def test_the_error_of_the_generation_is_raised() -> None:
    events, transport = Events(), Transport()
    writer = EventWriter(events, transport.write)
    running = asyncio.create_task(writer.run())
    await turns()
    events.error = stage_lost("engine")
    writer.wake()
    with pytest.raises(ServiceError) as caught:
        await running
    assert caught.value is events.error


@pytest.mark.parametrize("waits", [True, False])
async def test_an_error_of_the_transport_is_raised(*, waits: bool) -> None:
    async def write(event: StreamEvent) -> None:
        if waits:
            await asyncio.sleep(0.001)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await EventWriter(Events(1, 9), write).run()


async def test_a_cancelled_writer_breaks_its_write_off_and_takes_nothing_more() -> None:
    events, ended = Events(1, 2, 9), []
    transport = asyncio.get_running_loop().create_future()

    async def write(event: StreamEvent) -> None:
        try:
            await transport
        finally:
            ended.append(event)

    writer = EventWriter(events, write)
    running = asyncio.create_task(writer.run())
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    writer.wake()
    await turns()
    assert transport.cancelled() and len(ended) == 1 and list(events.waiting) == [2, 9]
