"""The HTTP server: uvicorn's, of bounded connections (`protocol`), and the files of HTTPS."""

import contextlib
import dataclasses
import functools
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from sluice_server.services.edge.connections import Bounds, Connections
from sluice_server.services.edge.protocol import BoundedProtocol
from sluice_server.services.edge.writing import Turn


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
    turn = Turn()
    protocol = functools.partial(BoundedProtocol, bounds=bounds, held=Connections(bounds), turn=turn)
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
