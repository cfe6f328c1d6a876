"""The HTTP server: uvicorn's HTTP/1.1, with connection limits and deadlines for clients that send or read slowly."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from sluice_server.services.edge.connections import Bounds, Connections, group_of
from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.exchange import ID, new_id


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

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP request, as other requests are refused: with an error object and a request id."""
        body = msgspec.json.encode(EdgeError(400, "invalid_request_error", msg).body())
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            parts = [
                self.conn.send(h11.Response(status_code=400, headers=[*head, (ID, new_id())])),
                self.conn.send(h11.Data(data=body)),
                self.conn.send(h11.EndOfMessage()),
            ]
        except h11.LocalProtocolError:  # in the midst of an answer
            parts = []
        self.transport.write(b"".join(part for part in parts if part))
        self.transport.close()

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


@dataclasses.dataclass(frozen=True, slots=True)
class HttpsFiles:
    """PEM files of HTTPS. With `client_ca`, clients must present a certificate that one of its authorities signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class EdgeServer(uvicorn.Server):
    """uvicorn's server, of which the process handles the signals: `stop` ends it. `on_started` is called when it takes
    connections."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets)
        self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    def stop(self) -> None:
        """Take no more connections and end when all answers are sent; called again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def read_certificate(self, files: HttpsFiles) -> None:
        """Read certificate and key again, for new connections. Raises OSError for unusable files."""
        assert self.config.ssl is not None
        self.config.ssl.load_cert_chain(files.certificate, files.key)


def server_of(app: ASGIApp, bounds: Bounds, *, grace_s: float, https: HttpsFiles | None = None) -> EdgeServer:
    """Returns a server of `app`. Raises OSError for unusable files of HTTPS."""
    protocol = functools.partial(BoundedProtocol, bounds=bounds, held=Connections(bounds))
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type] # a factory works like a class
        ssl_certfile=https.certificate if https else None,
        ssl_keyfile=https.key if https else None,
        ssl_ca_certs=https.client_ca if https else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if https and https.client_ca else ssl.CERT_NONE,
        access_log=False,
        ws="none",
        lifespan="off",
        log_level="error",  # its warnings are of what clients send
        log_config=None,  # the process's own
        timeout_graceful_shutdown=math.ceil(grace_s),
    )
    config.load()
    return EdgeServer(config)
