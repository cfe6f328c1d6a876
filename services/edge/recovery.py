"""Further attempts at a call whose connection to the gateway was lost, by the rules of the Python client.

Only a lost connection begins a recovery: what the server itself answers is the client's to see. A request that ends its
gateway each time is not sent for ever.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from sluice import errors
from sluice.retry import Retries, RetryPolicy

MOST_LOSSES = 3  # connections that one request may lose
POLICY = RetryPolicy()

_T = TypeVar("_T")


class CallRecovery:
    """The state of one request's attempts."""

    def __init__(self, channel: grpc.aio.Channel, policy: RetryPolicy = POLICY) -> None:
        self._channel = channel
        self._policy = policy
        self._num_lost = 0
        self._retries = Retries(policy, time.monotonic())

    async def after(self, error: grpc.aio.AioRpcError) -> None:
        """Waits until the call can be made again after `error`. Raises `error` if it is not to be made."""
        found, now = errors.from_rpc(error), time.monotonic()
        if found.code is grpc.StatusCode.UNAVAILABLE and not found.reason:
            self._num_lost += 1
            self._retries = Retries(self._policy, now)
        if not 1 <= self._num_lost <= MOST_LOSSES:
            raise error
        pause_s = self._retries.delay_s(found, now, random.random(), begun=True)
        if pause_s is None:
            raise error
        try:
            async with asyncio.timeout(self._policy.patience_s):
                await asyncio.sleep(pause_s)
                await self._channel.channel_ready()
        except TimeoutError:
            raise error from None


async def repeated(channel: grpc.aio.Channel, ask: Callable[[], Awaitable[_T]]) -> _T:
    """Makes a call that answers once, again if its connection is lost. Raises AioRpcError."""
    recovery = CallRecovery(channel)
    while True:
        try:
            return await ask()
        except grpc.aio.AioRpcError as error:
            await recovery.after(error)
