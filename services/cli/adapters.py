"""`sluice adapters`: lists, loads and unloads the adapters of a running service."""

from collections.abc import Iterator
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
from sluice_server.services.cli.rows import JsonOption, Row, show

if TYPE_CHECKING:
    from sluice.v1 import control_pb2

COLUMNS = ("name", "rank", "MiB", "where", "pinned", "open", "digest", "modules")

adapters = typer.Typer(help="Adapters (LoRA) of a running service.", no_args_is_help=True)


@adapters.callback()
def group() -> None:
    """Adapters (LoRA) of a running service."""


@adapters.command("list")
def list_(  # noqa: PLR0913 # a command line lists its options
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """List the adapters that are loaded."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        show(_rows(opened.adapters(timeout_s=30.0)), COLUMNS, as_json)


@adapters.command()
def load(  # noqa: PLR0913 # a command line lists its options
    name: Annotated[str, typer.Argument(help="the name for requests")],
    path: Annotated[
        str | None, typer.Argument(help="its folder below the server's --adapter-dir; default: the name")
    ] = None,
    *,
    address: AddressOption = ADDRESS,
    pinned: Annotated[bool, typer.Option(help="keep it loaded whatever else is asked for")] = False,
    digest: Annotated[str | None, typer.Option(help="digest that its files must have")] = None,
    as_json: JsonOption = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Load an adapter, in the place of one that has its name."""
    import sluice.adapters

    from sluice_server.services.cli.client import client, told

    options: sluice.adapters.LoadAdapterOptions = {"pinned": pinned}
    if digest is not None:
        options["expected_digest"] = digest
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        show(_rows([opened.load_adapter(name, path, **options)]), COLUMNS, as_json)


@adapters.command()
def unload(  # noqa: PLR0913 # a command line lists its options
    name: Annotated[str, typer.Argument(help="its name")],
    *,
    address: AddressOption = ADDRESS,
    grace: Annotated[
        float | None, typer.Option(min=0, help="seconds that its generations may continue; default: to their ends")
    ] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Take an adapter's name away, and drop it when its generations have ended."""
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        opened.unload_adapter(name, grace_s=grace)


def _rows(found: "list[control_pb2.Adapter]") -> Iterator[Row]:
    from sluice.v1 import control_pb2

    for one in found:
        where = control_pb2.AdapterResidency.Name(one.residency).removeprefix("ADAPTER_RESIDENCY_").lower()
        fields = {
            "name": one.name,
            "base_model": one.base_model,
            "digest": one.digest,
            "rank": one.rank,
            "modules": list(one.modules),
            "bytes": one.bytes,
            "residency": where,
            "pinned": one.pinned,
            "open_requests": one.open_requests,
            "path": one.path,
        }
        size, pinned = f"{one.bytes / (1 << 20):.1f}", "yes" if one.pinned else "no"
        cells = (one.name, str(one.rank), size, where, pinned, str(one.open_requests), one.digest[:12])
        yield fields, (*cells, " ".join(one.modules))
