"""The gRPC server that listens, and another one in its place when it stops by itself.

A server of grpc.aio stops for good when the loop that takes its calls raises, whatever raised. What runs then goes on
at the old server until it ends; a new one takes the port and whatever comes. What a client could make it raise with, a
path that is not UTF-8, is `acceptor`'s matter: replacing a server closes its connections. Knows no handler.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import grpc

from engine.errors import ServiceError
from services.gateway import server
from services.gateway.settings import GatewaySettings
from services.listening import bound

log = logging.getLogger(__name__)

LAST_CALLS_S = 3600.0  # what runs at a server that was replaced gets so long, as at one whose connections age


class Listener:
    """`start`, `look_after` now and then, `stop`."""

    def __init__(self, settings: GatewaySettings, build: Callable[[], grpc.aio.Server]) -> None:
        self._settings = settings
        self._build = build
        self._server: grpc.aio.Server | None = None
        self._replaced: dict[grpc.aio.Server, asyncio.Task[None]] = {}

    async def start(self) -> int:
        """Listen; the port. Raises `ServiceError` LISTEN_FAILED."""
        made = self._build()
        port = server.listen(made, self._settings)
        await made.start()
        self._server = made
        self._settings = dataclasses.replace(self._settings, listen=bound(self._settings.listen, port))
        return port

    async def look_after(self) -> bool:
        """Whether the server had stopped by itself, and another one has taken its place."""
        old = self._server
        if old is not None:
            try:
                await old.wait_for_termination(0.0)
                return False
            except Exception as error:  # whatever it was: nobody is let in any more
                log.error(
                    "the gRPC server stopped taking calls (%s); another one takes its place", type(error).__name__
                )
            self._server = None
            ending = self._replaced[old] = asyncio.create_task(_end(old, LAST_CALLS_S), name="old gRPC server")
            ending.add_done_callback(lambda _: self._replaced.pop(old, None))
        try:
            await self.start()
        except ServiceError:
            return False  # the old one may still hold the port: the next time
        return True

    async def stop(self, grace_s: float) -> None:
        """End all calls that still run after `grace_s`."""
        servers = [*self._replaced, *([self._server] if self._server is not None else [])]
        await asyncio.gather(*[_end(one, grace_s) for one in servers])


async def _end(old: grpc.aio.Server, grace_s: float) -> None:
    try:
        await old.stop(grace_s)
    except UnicodeDecodeError:
        log.debug("a gRPC server that had stopped by itself says so again")
