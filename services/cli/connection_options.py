"""Options with which a client command reaches a server that requires TLS or a key, and their values. Opens no
channel."""

import dataclasses
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from sluice_server.services.config import bad_setting
from sluice_server.services.process.listening import UNIX, is_local

PANEL = "Connection"
ADDRESS = "127.0.0.1:50051"
AddressOption: TypeAlias = Annotated[str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server")]
AdapterOption: TypeAlias = Annotated[
    str | None, typer.Option(envvar="SLUICE_ADAPTER", help="name of an adapter (LoRA) of the model; default: none")
]
# The variables differ from those of `serve`, which name the server's own files.
TlsOption: TypeAlias = Annotated[
    bool, typer.Option("--tls", envvar="SLUICE_CLIENT_TLS", help="use TLS", rich_help_panel=PANEL)
]
TlsCaOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(envvar="SLUICE_CLIENT_TLS_CA", help="PEM authorities; default: the host's", rich_help_panel=PANEL),
]
TlsCertOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(envvar="SLUICE_CLIENT_TLS_CERT", help="PEM certificate of this client (mTLS)", rich_help_panel=PANEL),
]
TlsKeyOption: TypeAlias = Annotated[
    Path | None, typer.Option(envvar="SLUICE_CLIENT_TLS_KEY", help="PEM key of --tls-cert", rich_help_panel=PANEL)
]
TimeoutOption: TypeAlias = Annotated[
    float | None, typer.Option(min=0.001, envvar="SLUICE_TIMEOUT", help="deadline of each call in seconds")
]
TokenOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        "--token",
        envvar=["SLUICE_API_KEY", "SLUICE_TOKEN"],
        help="key to authenticate with; of several, separated by spaces, the first",
        rich_help_panel=PANEL,
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Whether to use TLS, the files to trust and to present, and the key."""

    has_tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = None

    @staticmethod
    def of(
        address: str, tls: bool, files: tuple[Path | None, Path | None, Path | None], token: str | None
    ) -> "ConnectionOptions":
        """Returns the value of the options; a file implies TLS. Raises ServiceError if a key would be sent in
        plaintext to another host, or the address has no port."""
        if not address.startswith(UNIX) and not address.rpartition(":")[2].isdecimal():
            raise bad_setting("address", f"{address!r} has no port: give host:port, such as 127.0.0.1:50051")
        ca, certificate, key = files
        if (certificate is None) != (key is None):
            raise bad_setting("tls_cert", "and --tls-key are needed together")
        has_tls = tls or any(files)
        token = token.split()[0] if token and token.strip() else None
        if token and not has_tls and not is_local(address):
            raise bad_setting("api_key", f"would be sent to {address} in plaintext: add --tls or --tls-ca")
        return ConnectionOptions(has_tls, ca, certificate, key, token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()
