"""A way to send completions for an open loop by gRPC, with the Python client of this repository."""

import contextlib
import time
from collections.abc import AsyncIterator

import sluice

from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.open_loop import Completion, Send

CHANNELS = 4


@contextlib.asynccontextmanager
async def calls(address: str, adapter: str = "") -> AsyncIterator[Send]:
    """A call of its own for each request. `adapter`: the name of one, "" for the model itself."""
    async with sluice.AsyncClient(address, retry=sluice.NEVER, channels=CHANNELS) as client:

        async def send(one: Completion, flight: Flight) -> None:
            stream = client.stream(
                list(one.prompt),
                adapter=adapter,
                max_tokens=one.num_tokens,
                temperature=0.0,
                ignore_eos=True,
                token_records=False,
            )
            first = 0.0
            try:
                async for _ in stream:
                    if not first:
                        flight.first = first = time.perf_counter()
            except sluice.SluiceError as error:
                raise ConnectionError(str(error)) from error
            flight.end = time.perf_counter()

        yield send
