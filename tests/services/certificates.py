"""Certificate authorities and certificates that tests create."""

import dataclasses
import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sluice_server.services.gateway.access.tls_files import TlsFiles


@dataclasses.dataclass(frozen=True)
class Pair:
    """PEM certificate and key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str = "server") -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(self.certificate)
        key.write_bytes(self.key)
        return certificate, key


class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._certificate = (
            _unsigned(self._name, self._name, self._key, 0, 24)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, from_h: int = 0, to_h: int = 24) -> Pair:
        """A certificate that is valid from `from_h` hours from now (less one) to `to_h`, with names of this host.

        `name` is its CN and not among its host names.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        certificate = (
            _unsigned(_named(name), self._name, key, from_h, to_h)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )


def written(folder: Path, authority: Authority, name: str = "server", *, mutual: bool = False) -> TlsFiles:
    """A fresh server certificate on disk; `mutual` asks clients for one of the same authority."""
    certificate, key = authority.issue(name).write(folder)
    client_ca = folder / "ca.pem"
    client_ca.write_bytes(authority.pem)
    return TlsFiles(certificate, key, client_ca if mutual else None)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, from_h: int, to_h: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(hours=from_h - 1))
        .not_valid_after(now + datetime.timedelta(hours=to_h))
    )
