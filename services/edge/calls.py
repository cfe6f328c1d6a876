"""Reads several gRPC streams as one: events in the order in which they come, those that came together at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from sluice_server.services.edge.resumed import EdgeStream
from sluice_server.services.edge.shared import Event


async def events_of(
    calls: Sequence[EdgeStream], firsts: Sequence[Sequence[Event]]
) -> AsyncGenerator[tuple[int, Sequence[Event]], None]:
    """Yields the events of `calls` with the number of their call; `firsts` are those read already, of each call. Reads
    no events before they are wanted, except those of one read of each call."""
    for at, first in enumerate(firsts):
        yield at, first
    if len(calls) == 1:  # without a task for each read
        while events := await calls[0].read():
            yield 0, events
        return
    reads = {asyncio.ensure_future(call.read()): at for at, call in enumerate(calls)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                at, events = reads.pop(read), read.result()
                if events:
                    yield at, events
                    reads[asyncio.ensure_future(calls[at].read())] = at
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
