"""`sluice cache`: changes and clears the caches of a running service's engines."""

import contextlib
import re
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AddressOption,
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)

if TYPE_CHECKING:
    from sluice.v1 import control_pb2

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

cache = typer.Typer(help="The caches of a running service's engines.", no_args_is_help=True)


@cache.callback()
def group() -> None:
    """The caches of a running service's engines."""


@cache.command()
def resize(  # noqa: PLR0913 # a command line lists its options
    tokens: Annotated[
        int | None,
        typer.Option(envvar="SLUICE_TOKENS", help="tokens that the cache is to hold; default: as now"),
    ] = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(envvar="SLUICE_HOST_BYTES", help="size of the host tier, such as 512MiB; default: its size now"),
    ] = None,
    process: Annotated[
        str, typer.Option(envvar="SLUICE_PROCESS", help="id of the engine, such as engine-1; default: the first")
    ] = "",
    address: AddressOption = ADDRESS,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Make the cache of an engine larger or smaller while it serves. It goes on if this command is ended. With an
    access file it needs a key of scope admin."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    size = None if host_bytes is None else bytes_of(host_bytes)
    with told(address), client(address, access) as opened:
        reports = opened.resize_cache(tokens, size, process=process)
        with contextlib.closing(reports):
            for report in reports:
                typer.echo(line_of(report), err=not report.done)


@cache.command()
def clear(  # noqa: PLR0913 # a command line lists its options
    tenant: Annotated[
        str | None, typer.Option(envvar="SLUICE_TENANT", help="the tenant whose blocks are deleted")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="delete the blocks of all tenants")] = False,
    process: Annotated[
        str, typer.Option(envvar="SLUICE_PROCESS", help="id of the engine, such as engine-1; default: every one")
    ] = "",
    address: AddressOption = ADDRESS,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Delete what engines have cached of a tenant's requests, in memory and on disk. With an access file it needs a key
    of scope admin."""
    from sluice_server.services.cli.client import client, told

    if everyone == (tenant is not None):
        raise typer.BadParameter("give --tenant NAME, or --all for those of all tenants")
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with told(address), client(address, access) as opened:
        reports = opened.clear_cache(tenant, process=process)
        with contextlib.closing(reports):
            for report in reports:
                typer.echo(cleared_line(report), err=not report.done)


def cleared_line(report: "control_pb2.ClearCacheResponse") -> str:
    """Returns a report of clearing as a line."""
    if not report.done:
        return f"{report.process}: {report.blocks_left} blocks to wipe"
    in_use = f"; {report.blocks_in_use} in use are wiped when their requests end" if report.blocks_in_use else ""
    return f"{report.process}: {report.blocks} cached blocks deleted{in_use}"


def line_of(report: "control_pb2.ResizeCacheResponse") -> str:
    """Returns a report as a line."""
    if not report.done:
        return f"{report.process}: {report.blocks_left} blocks to move"
    host = f", {report.host_bytes} bytes of its host tier" if report.host_bytes else ""
    most = f"{report.tokens} tokens of at most {report.max_tokens}"
    return f"{report.process}: {most}{host}; {report.released_bytes} bytes given back"


def bytes_of(text: str) -> int:
    """Returns a number of bytes, written as a number with KiB, MiB, GiB or nothing behind it. Raises BadParameter."""
    found = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB|)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes, such as 1048576, 512MiB or 2GiB")
    return int(found[1]) * UNITS[found[2]]
