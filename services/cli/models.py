"""`sluice models`: lists, loads, unloads and names the models of a running service."""

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

COLUMNS = ("id", "state", "aliases", "open", "MiB", "revision", "failure")

ModelArgument = Annotated[str, typer.Argument(help="its id")]
GraceOption = Annotated[
    float | None, typer.Option(min=0, help="seconds that its generations may continue; default: to their ends")
]

models = typer.Typer(help="Models of a running service.", no_args_is_help=True)


@models.callback()
def group() -> None:
    """Models of a running service."""


@models.command("list")
def list_(  # noqa: PLR0913 # a command line lists its options
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """List the models that the service has."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        show(_rows(opened.models(timeout_s=30.0)), COLUMNS, as_json)


@models.command()
def load(  # noqa: PLR0913 # a command line lists its options
    model: Annotated[str, typer.Argument(help="its id in requests")],
    source: Annotated[
        str | None,
        typer.Argument(help="its files below the server's --models-dir; default: as its --models file says, or the id"),
    ] = None,
    *,
    address: AddressOption = ADDRESS,
    revision: Annotated[str | None, typer.Option(help="label of its revision")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="name=value, an option of `sluice serve` for it; may be repeated")
    ] = None,
    pinned: Annotated[bool, typer.Option(help="never unload it to make room")] = False,
    expected: Annotated[str | None, typer.Option(help="revision that its files must have")] = None,
    as_json: JsonOption = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Load a model beside the others, and wait until it serves."""
    import sluice.models

    from sluice_server.services.cli.client import client, told

    options: sluice.models.LoadModelOptions = {"settings": dict(map(_pair, setting or ()))}
    if pinned:
        options["pinned"] = True
    if source is not None:
        options["source"] = source
    if revision is not None:
        options["revision"] = revision
    if expected is not None:
        options["expected_revision"] = expected
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        show(_rows([opened.load_model(model, **options)]), COLUMNS, as_json)


@models.command()
def unload(  # noqa: PLR0913 # a command line lists its options
    model: ModelArgument,
    *,
    address: AddressOption = ADDRESS,
    grace: GraceOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Unload a model when its generations have ended."""
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        opened.unload_model(model, grace_s=grace)


@models.command()
def sleep(  # noqa: PLR0913 # a command line lists its options
    model: ModelArgument,
    *,
    address: AddressOption = ADDRESS,
    grace: GraceOption = None,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: keep the weights and empty the cache; 2: stop its processes")
    ] = 2,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Stop a model's processes, or empty their cache, until it is asked for."""
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        opened.sleep_model(model, grace_s=grace, level=level)


@models.command()
def wake(  # noqa: PLR0913 # a command line lists its options
    model: ModelArgument,
    *,
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Wake a model that sleeps, and wait until it serves."""
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        show(_rows([opened.wake_model(model)]), COLUMNS, as_json)


@models.command()
def alias(  # noqa: PLR0913 # a command line lists its options
    name: Annotated[str, typer.Argument(help="the alias")],
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL[=WEIGHT]", help="what it stands for; nothing: forget it")
    ] = None,
    *,
    address: AddressOption = ADDRESS,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Make a name stand for a model, or for several by weight: a canary, a swap, and the way back."""
    from sluice_server.services.cli.client import client, told

    weights = dict(map(_weight, targets or ()))
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        opened.set_alias(name, weights)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise typer.BadParameter(f"{text!r} is not name=value", param_hint="--setting")
    return name, value


def _weight(text: str) -> tuple[str, int]:
    model, sign, weight = text.rpartition("=")
    if not sign:
        return text, 1
    if not weight.isdecimal():
        raise typer.BadParameter(f"{text!r} is not model=weight with a whole number", param_hint="TARGETS")
    return model, int(weight)


def _rows(found: "list[control_pb2.Model]") -> Iterator[Row]:
    from sluice.v1 import control_pb2

    for one in found:
        state = control_pb2.ModelState.Name(one.state).removeprefix("MODEL_STATE_").lower()
        fields = {
            "id": one.id,
            "revision": one.revision,
            "state": state,
            "sleep_level": one.sleep_level,
            "aliases": {each.alias: each.weight for each in one.aliases},
            "open_requests": one.open_requests,
            "memory_bytes": one.memory_bytes,
            "pinned": one.pinned,
            "processes": list(one.processes),
            "failure": one.failure,
        }
        names = " ".join(f"{each.alias}={each.weight}" for each in one.aliases)
        size = f"{one.memory_bytes / (1 << 20):.0f}"
        shown = f"{state} ({one.sleep_level})" if one.sleep_level else state
        yield fields, (one.id, shown, names, str(one.open_requests), size, one.revision, one.failure)
