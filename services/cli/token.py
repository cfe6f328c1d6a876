"""`sluice token new`: makes a key for a client, and its block for the server's access file, which has only its hash."""

from typing import Annotated

import typer

token = typer.Typer(help="Keys for clients.", no_args_is_help=True)


@token.callback()
def group() -> None:
    """Keys for clients."""


@token.command()
def new(
    tenant: Annotated[str, typer.Option(help="the tenant that the key belongs to")],
    scopes: Annotated[
        str, typer.Option(help="what the key permits: generate, control, admin; comma-separated")
    ] = "generate",
) -> None:
    """Make a key and print it once, on standard error. The block for the server is printed on standard output: append
    it (`>>`) to the file of `sluice serve --access-file`."""
    # Imported here, so that the other commands start without it.
    import msgspec

    from sluice_server.services.config import bad_setting
    from sluice_server.services.gateway.access.identity import Scope, digest_of, new_key

    wanted = [one.strip() for one in scopes.split(",")]
    unknown = [one for one in wanted if one not in list(Scope)]
    if unknown or not tenant:
        raise bad_setting("scopes", f"{scopes!r} is not a list of {', '.join(Scope)}, or the tenant is empty")
    key = new_key()
    # JSON strings and lists of strings are valid TOML.
    lines = {"sha256": digest_of(key).hex(), "tenant": tenant, "scopes": wanted}
    typer.echo(key, err=True)
    typer.echo("\n[[keys]]")  # starts a new line, as the file may end without one
    for name, value in lines.items():
        typer.echo(f"{name} = {msgspec.json.encode(value).decode()}")
