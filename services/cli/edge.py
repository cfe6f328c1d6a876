"""`sluice edge`: serves OpenAI's HTTP API and a web page on a separate address, in front of a running service.

Its options are made from `EdgeSettings`, so that each is defined once.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from sluice_server.services.cli.connection_options import PANEL, ConnectionOptions
from sluice_server.services.cli.options import parameter
from sluice_server.services.process import exit_reason
from sluice_server.services.process.edge_settings import SHARED, EdgeSettings, check, path_of, variable
from sluice_server.services.process.listening import check_plaintext, is_local

if TYPE_CHECKING:
    import grpc

# The groups of the help, in order; a setting that is in none stands last.
GROUPS = {
    "Usual options": ("address", "listen", "https_cert", "https_key"),
    "HTTP": ("https_client_ca", "insecure", "allowed_origins", "allowed_hosts", "root_path", "access_log"),
    PANEL: tuple(name for name in SHARED if name != "address"),
    "Process": (),
}


def _takes_settings(command: Callable[[EdgeSettings], None]) -> Callable[..., None]:
    """Wrap a command that takes the settings into one with an option for every field."""

    def run(**values: Any) -> None:  # noqa: ANN401 # types are in the signature below
        command(EdgeSettings(**values))

    fields = {field.name: field for field in dataclasses.fields(EdgeSettings)}
    placed = [name for names in GROUPS.values() for name in names]
    groups = {**GROUPS, [*GROUPS][-1]: tuple(name for name in fields if name not in placed)}
    options = [parameter(fields[name], group, variable(name)) for group, names in groups.items() for name in names]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined] # typer reads it
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


@_takes_settings
def edge(settings: EdgeSettings) -> None:
    """Serve OpenAI's API, vLLM's small routes and a page at / over HTTP, in front of a server; API keys are passed on.
    `sluice serve --http` starts one beside the server."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.cli.client import aio_channel
    from sluice_server.services.process.edge import run_edge

    is_supervised = "SLUICE_SUPERVISOR_PID" in os.environ
    with exit_reason.recorded_in(settings.heartbeat_dir, settings.process_id, is_supervised=is_supervised):
        check(settings)
        files = (path_of(settings.tls_ca), path_of(settings.tls_cert), path_of(settings.tls_key))
        access = ConnectionOptions.of(settings.address, settings.tls, files, None)
        if not access.has_tls and not is_local(settings.address) and not settings.insecure:
            check_plaintext("address", settings.address, False, False)

        def open_channel() -> "grpc.aio.Channel":
            return aio_channel(settings.address, access)

        status = run_edge(settings, open_channel)
    raise typer.Exit(status)
