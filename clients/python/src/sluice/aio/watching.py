"""Reads the load that each of several addresses reports, for the balance between them: a task for each address."""

import asyncio

import grpc

from sluice import errors
from sluice.aio.stream import AsyncLine
from sluice.balance import INTERVAL_S, MAX_REST_S, is_refused
from sluice.pool import Pool
from sluice.stream import Metadata
from sluice.v1 import control_pb2


class AsyncLoadWatch:
    """Follows WatchLoad of every address of a pool until it is closed."""

    def __init__(self, pool: Pool[AsyncLine], metadata: Metadata) -> None:
        self._pool = pool
        self._metadata = metadata
        self._tasks = [asyncio.create_task(self._follow(address)) for address in range(pool.num_targets)]

    async def close(self) -> None:
        """Ends the calls and their tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, address: int) -> None:
        request, rest_s = control_pb2.WatchLoadRequest(), INTERVAL_S
        request.interval.FromNanoseconds(int(INTERVAL_S * 1e9))
        while True:
            call = self._pool.line_of(address).control.WatchLoad(request, metadata=self._metadata)
            try:
                async for answer in call:
                    self._pool.reported(address, answer.load)
                    rest_s = INTERVAL_S
            except grpc.aio.AioRpcError as error:
                failed = errors.from_rpc(error)
                if is_refused(failed):
                    return
                self._pool.failed(address, failed)
            finally:
                call.cancel()  # does nothing to a call that has ended
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, MAX_REST_S)
