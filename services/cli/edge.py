"""`sluice edge`: serves OpenAI's HTTP API and a web page on a separate address, in front of a running service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.services.cli.connection_options import (
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
)

if TYPE_CHECKING:
    from sluice_server.services.edge.connections import Bounds

GRACE_S = 30
MAX_CONNECTIONS = 4096
OTHER_FILES = 64  # files that the process has open besides its clients' connections
SHARE_OF_ADDRESS = 4  # one address may take a quarter of the connections


def edge(  # noqa: PLR0913 # a command line lists its options
    address: Annotated[str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server")] = "127.0.0.1:50051",
    listen: Annotated[str, typer.Option(envvar="SLUICE_EDGE_LISTEN", help="host:port for HTTP")] = "127.0.0.1:8000",
    https_cert: Annotated[
        Path | None, typer.Option(envvar="SLUICE_EDGE_HTTPS_CERT", help="PEM certificate of the HTTP side")
    ] = None,
    https_key: Annotated[
        Path | None, typer.Option(envvar="SLUICE_EDGE_HTTPS_KEY", help="PEM key of --https-cert")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="SLUICE_EDGE_INSECURE", help="serve other hosts in plaintext")
    ] = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models and a page at / over HTTP; API keys are passed on."""
    # Imported here, so that the other commands start without it.
    import uvloop

    from sluice_server.services.process.listening import check_plaintext, is_local

    check_plaintext("listen", listen, https_cert is not None, insecure)
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), None)
    if not access.has_tls and not is_local(address) and not insecure:
        check_plaintext("address", address, False, False)
    uvloop.run(_serve(address, listen, access, (https_cert, https_key)))


async def _serve(address: str, listen: str, access: ConnectionOptions, files: tuple[Path | None, Path | None]) -> None:
    import socket

    from sluice_server.services.cli.client import aio_channel
    from sluice_server.services.config import bad_setting
    from sluice_server.services.edge.app import build
    from sluice_server.services.edge.server import server_of
    from sluice_server.services.process.listening import bound, split

    host, port = split("listen", listen)
    async with aio_channel(address, access) as channel:
        try:
            server = server_of(build(channel), _bounds(), grace_s=GRACE_S, files=files)
        except OSError as error:
            raise bad_setting("https_cert", f"{files[0]} and {files[1]} cannot be used: {error.strerror}") from None
        try:
            opened = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise bad_setting("listen", f"cannot listen on {listen}: {error.strerror}") from None
        with opened:
            scheme = "https" if files[0] else "http"
            print(f"sluice: edge on {scheme}://{bound(listen, opened.getsockname()[1])} for {address}", flush=True)
            await server.serve(sockets=[opened])


def _bounds() -> "Bounds":
    """Raise the limit of open files to the system's hard limit, and return the number of connections that it allows."""
    import resource

    from sluice_server.services.edge.connections import Bounds

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, hard - OTHER_FILES))
    return Bounds(most, max(1, most // SHARE_OF_ADDRESS))
