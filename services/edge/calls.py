"""Reads several gRPC streams as one: events in the order in which they come, each with the number of its stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from sluice_server.services.edge.resumed import EdgeStream, Event


async def events_of(calls: Sequence[EdgeStream], firsts: Sequence[Event]) -> AsyncIterator[tuple[int, Event]]:
    """Yields the events of `calls`; `firsts` are those read already, one of each. Reads no event before it is
    wanted, except one of each stream."""
    for at, first in enumerate(firsts):
        yield at, first
    if len(calls) == 1:  # without a task for each event
        while (event := await calls[0].read()) is not None:
            yield 0, event
        return
    reads = {asyncio.ensure_future(call.read()): at for at, call in enumerate(calls)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                at, event = reads.pop(read), read.result()
                if event is not None:
                    yield at, event
                    reads[asyncio.ensure_future(calls[at].read())] = at
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
