"""The paths of a server's certificate, from three settings."""

import dataclasses
from pathlib import Path

from sluice_server.services.config import bad_setting


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must present a certificate that is signed by one of its authorities
    (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All given paths."""
        return tuple(filter(None, (self.certificate, self.key, self.client_ca)))


def files_of(certificate: str, key: str, client_ca: str) -> TlsFiles | None:
    """Returns the three settings as one value; None without TLS. Raises ServiceError if only some are given."""
    if not certificate and not key and not client_ca:
        return None
    if not certificate:
        raise bad_setting("tls_cert", "is needed with --tls-key and --tls-client-ca")
    if not key:
        raise bad_setting("tls_key", "is needed with --tls-cert")
    return TlsFiles(Path(certificate), Path(key), Path(client_ca) if client_ca else None)
