"""The HTTP server: uvicorn's HTTP/1.1, with connection limits and deadlines for clients that send or read slowly."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from sluice_server.services.edge.connections import Bounds, Connections, group_of


class BoundedProtocol(H11Protocol):
    """One connection.

    uvicorn has a timer for an idle connection after a response. It has none for a request that does not arrive, nor for
    a response that is not read; those are added here.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        bounds: Bounds,
        held: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds
        self._held = held
        self._coming: asyncio.TimerHandle | None = None  # deadline of the request that is being received
        self._taken: asyncio.TimerHandle | None = None  # deadline of a response that the client does not read
        self._read: RequestResponseCycle | None = None  # the last request whose head has arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept the connection, or close it if it is over the limits."""
        super().connection_made(transport)
        if not self._held.opened(self, group_of(self.client[0] if self.client else "")):
            transport.abort()
            return
        self._expect(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its timers."""
        self._held.closed(self)
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, unless its next request has already begun."""
        self._held.rests(self)
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Start the deadline `write_s`: the client does not read."""
        super().pause_writing()
        self._taken = self.loop.call_later(self._bounds.write_s, self.close)

    def resume_writing(self) -> None:
        """Cancel that deadline: the client reads again."""
        if self._taken is not None:
            self._taken.cancel()
            self._taken = None
        super().resume_writing()

    def close(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        self.transport.abort()

    def _look(self) -> None:
        """Set the deadline for the head or the body of a request; none while a request is answered."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._coming is None and self.conn.trailing_data[0]:
                self._expect(self._bounds.head_s)  # uvicorn's own timer stops at the first byte
            return
        self._held.works(self)
        if not cycle.more_body:
            self._expect(None)
        elif self._read is not cycle:
            self._expect(self._bounds.body_s)
        self._read = cycle

    def _expect(self, seconds: float | None) -> None:
        if self._coming is not None:
            self._coming.cancel()
        self._coming = None if seconds is None else self.loop.call_later(seconds, self.close)


def server_of(
    app: Starlette, bounds: Bounds, *, grace_s: int, files: tuple[Path | None, Path | None] = (None, None)
) -> uvicorn.Server:
    """Returns a server of `app`, with TLS if there are `files`: certificate and key. Raises OSError for unusable
    files."""
    protocol = functools.partial(BoundedProtocol, bounds=bounds, held=Connections(bounds))
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type] # a factory works like a class
        ssl_certfile=files[0],
        ssl_keyfile=files[1],
        access_log=False,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=grace_s,
    )
    config.load()
    return uvicorn.Server(config)
