"""The listening gRPC server, which is replaced by a new one when it stops by itself.

A server of grpc.aio stops for good when its accept loop raises any exception. Running calls then go on at the old
server until they end; a new server takes the port and new calls. The same happens when the file of a Unix socket was
removed. Replacing a server closes its connections, so the one exception that a client could cause, by a path that is
not UTF-8, is prevented in `acceptor`. Independent of the handlers.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.calls import server
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.process.listening import UNIX, bound, socket_path
from sluice_server.services.process.socket_file import SocketFile

log = logging.getLogger(__name__)

LAST_CALLS_S = 3600.0  # time for the running calls of a replaced server; as the grace after max_connection_age


class PortListener:
    """The listening server: call `start`, `look_after` regularly, and `stop`."""

    def __init__(self, settings: GatewaySettings, build: Callable[[], grpc.aio.Server]) -> None:
        self._settings = settings
        self._build = build
        self._server: grpc.aio.Server | None = None
        self._replaced: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        path = socket_path(settings.listen)
        self._own = SocketFile(path) if path is not None else None
        self._peer = SocketFile(Path(settings.peer_socket)) if settings.peer_socket else None
        self._files = [file for file in (self._own, self._peer) if file is not None]

    async def start(self) -> int:
        """Listens; returns the port. Raises `ServiceError` LISTEN_FAILED."""
        for file in self._files:
            file.claim()
        made = self._build()
        port = server.listen(made, self._unbound())
        await made.start()
        for file in self._files:
            file.publish()
        self._server = made
        self._settings = dataclasses.replace(self._settings, listen=bound(self._settings.listen, port))
        return port

    async def look_after(self) -> bool:
        """Replaces the server if it has stopped by itself or cannot be reached; returns whether it did."""
        why = await self._why_replace() if self._server is not None else ""
        if self._server is not None:
            if not why:
                return False
            log.error("the gRPC server %s; another one takes its place", why)
            old, self._server = self._server, None
            ending = self._replaced[old] = asyncio.create_task(_end(old, LAST_CALLS_S), name="old gRPC server")
            ending.add_done_callback(lambda _: self._replaced.pop(old, None))
        try:
            await self.start()
        except ServiceError:
            return False  # the old server may still hold the port: tried again at the next call
        return True

    async def stop(self, grace_s: float) -> None:
        """Stops all servers; calls that still run after `grace_s` are ended."""
        servers = [*self._replaced, *([self._server] if self._server is not None else [])]
        await asyncio.gather(*[_end(one, grace_s) for one in servers])
        for file in self._files:
            file.release()

    async def _why_replace(self) -> str:
        """Returns why the server must be replaced; "" while it serves."""
        assert self._server is not None
        try:
            await self._server.wait_for_termination(0.0)
        except Exception as error:  # after any exception the server takes no more calls
            return f"stopped taking calls ({type(error).__name__})"
        gone = [str(file.path) for file in self._files if file.is_gone]
        return f"cannot be reached, as something removed {' and '.join(gone)}" if gone else ""

    def _unbound(self) -> GatewaySettings:
        """Returns the settings with the names that the Unix sockets have before they are published."""
        settings = self._settings
        if self._own is not None:
            settings = dataclasses.replace(settings, listen=f"{UNIX}{self._own.unbound}")
        if self._peer is not None:
            settings = dataclasses.replace(settings, peer_socket=str(self._peer.unbound))
        return settings


async def _end(old: grpc.aio.Server, grace_s: float) -> None:
    try:
        await old.stop(grace_s)
    except UnicodeDecodeError:
        log.debug("a gRPC server that had stopped by itself reports it again")
