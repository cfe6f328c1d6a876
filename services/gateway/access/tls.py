"""The server's certificate: read, proved by a handshake with itself, and read again when its files change.

Takes three paths, gives grpc credentials. Python's own ssl module judges the files, as grpc says only "failed to bind".
Knows no port and no identity.
"""

import ssl
from pathlib import Path

import grpc

from sluice_server.services.config import bad_setting
from sluice_server.services.gateway.access.tls_files import TlsFiles
from sluice_server.services.process.watched import WatchedFile

MAX_TURNS = 8  # of a handshake in memory; TLS 1.3 takes three


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files: each handshake looks whether they changed. Raises ServiceError."""
    watched = WatchedFile(files.paths, lambda: read(files))

    def changed() -> grpc.ServerCertificateConfiguration | None:
        return watched.value if watched.refresh() else None  # None: go on with what there is

    # Called by grpc at every handshake, on its own thread: a few stat() calls.
    return grpc.dynamic_ssl_server_credentials(
        watched.value,
        changed,  # type: ignore[arg-type] # None is documented, the type package leaves it out
        require_client_authentication=files.client_ca is not None,
    )


def read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """What grpc needs. Raises ServiceError naming the file and what is wrong with it."""
    chain, key = _read("tls_cert", files.certificate), _read("tls_key", files.key)
    prove(files, chain)
    authorities = None
    if files.client_ca is not None:
        authorities = _read("tls_client_ca", files.client_ca)
        _trusting("tls_client_ca", files.client_ca, authorities)
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)


def prove(files: TlsFiles, chain: bytes) -> None:
    """Shake hands with ourselves in memory: certificate and key belong together and are valid now."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.certificate, files.key, password="")  # "": never ask at the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise bad_setting("tls_key", f"{files.key} is not the key of the certificate {files.certificate}") from None
        raise bad_setting(
            "tls_cert", f"{files.certificate} and {files.key} are not a PEM certificate and its unencrypted PEM key"
        ) from None
    client = _trusting("tls_cert", files.certificate, chain)
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        raise bad_setting("tls_cert", f"{files.certificate} cannot be used: {error.verify_message}") from None


def _trusting(setting: str, path: Path, certificates: bytes) -> ssl.SSLContext:
    """A client that trusts exactly these."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # names are the clients' business
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cadata=certificates.decode("ascii", "replace"))
    except ssl.SSLError:
        raise bad_setting(setting, f"{path} holds no PEM certificate that can be read") from None
    return client


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(MAX_TURNS):
        for end in tuple(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise bad_setting(setting, f"cannot read {path}: {error.strerror}") from None
