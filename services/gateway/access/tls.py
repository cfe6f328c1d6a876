"""The server's certificate: reads it, proves it by a handshake in memory, and reads it again when its files change.

Takes three paths and returns grpc credentials. Python's ssl module checks the files, because grpc says only "failed to
bind".
"""

import ssl
from pathlib import Path

import grpc

from sluice_server.services.config import bad_setting
from sluice_server.services.gateway.access.tls_files import TlsFiles
from sluice_server.services.process.watched import WatchedFile

MAX_TURNS = 8  # round trips of a handshake in memory; TLS 1.3 takes three


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns credentials that follow the files: each handshake checks whether they changed. Raises ServiceError."""
    watched = WatchedFile(files.paths, lambda: read(files))

    def changed() -> grpc.ServerCertificateConfiguration | None:
        return watched.value if watched.refresh() else None  # None: keep the present one

    # Called by grpc at every handshake, on its own thread: a few stat() calls.
    return grpc.dynamic_ssl_server_credentials(
        watched.value,
        changed,  # type: ignore[arg-type] # None is documented but missing in the type package
        require_client_authentication=files.client_ca is not None,
    )


def read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Reads the files into grpc's configuration. Raises ServiceError naming the file and what is wrong with it."""
    chain, key = _read("tls_cert", files.certificate), _read("tls_key", files.key)
    prove(files, chain)
    authorities = None
    if files.client_ca is not None:
        authorities = _read("tls_client_ca", files.client_ca)
        _trusting("tls_client_ca", files.client_ca, authorities)
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)


def prove(files: TlsFiles, chain: bytes) -> None:
    """Makes a TLS handshake in memory: certificate and key belong together and are valid now. Raises ServiceError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.certificate, files.key, password="")  # "": no prompt at the terminal
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
    """Returns a client context that trusts exactly these certificates."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # clients check the name
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
