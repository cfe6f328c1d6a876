"""Addresses that a server listens on: parsing, and the check whether one may be served in plaintext.

Pure: opens no socket. An address is `host:port`, `[ipv6]:port` or `unix:/path`.
"""

import ipaddress
from pathlib import Path

from sluice_server.services.config import ServiceConfig, bad_setting

UNIX = "unix:"
SOCKET_SUFFIX = ".grpc"  # appended to the path of a gateway's inbox: the Unix socket for its peers and edges


def split(setting: str, listen: str) -> tuple[str, int]:
    """Returns host and port of `listen`. Raises ServiceError naming `setting` if it is malformed."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise bad_setting(setting, f"{listen!r} is not host:port, such as 127.0.0.1:50051")
    if int(port) > 65535:
        raise bad_setting(setting, f"the port {port} is above 65535")
    return host.strip("[]"), int(port)


def socket_path(listen: str) -> Path | None:
    """Returns the path of a Unix socket; None for a host and port. gRPC accepts `unix:path` and `unix:///path`."""
    path = listen.removeprefix(UNIX)
    return None if path == listen else Path(path.removeprefix("//"))


def bound(listen: str, port: int) -> str:
    """Returns the address for clients: `listen` with the port that was bound."""
    return listen if listen.startswith(UNIX) else f"{listen.rpartition(':')[0]}:{port}"


def is_local(listen: str) -> bool:
    """Whether only this host can reach the address: a Unix socket, `localhost`, or a loopback address."""
    if listen.startswith(UNIX):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # other names are not resolved here


def check_keyless(setting: str, listen: str, has_client_ca: bool) -> None:
    """Raise ServiceError unless `listen`, whose callers bring no key, is for this host or for known certificates."""
    if not listen.startswith(UNIX):
        split(setting, listen)
    if not has_client_ca and not is_local(listen):
        raise bad_setting(
            setting,
            f"{listen} can be reached from other hosts, and its callers bring no key: listen on 127.0.0.1 or "
            "unix:/path, or set --tls-cert, --tls-key and --tls-client-ca, so that callers must show a certificate",
        )


def check_vllm(service: ServiceConfig) -> None:
    """Raise ServiceError for a `--vllm-listen` that is not allowed, or with several gateways."""
    if not service.vllm_listen:
        return
    check_keyless("vllm_listen", service.vllm_listen, bool(service.tls_client_ca))
    if service.gateways > 1:  # Abort and the numbers of events belong to one process
        raise bad_setting("gateways", f"{service.gateways} processes cannot share --vllm-listen: run one gateway")


def check_plaintext(setting: str, listen: str, has_tls: bool, is_insecure: bool) -> None:
    """Raise ServiceError if `listen` is malformed, or plaintext on it is neither safe nor allowed by `is_insecure`."""
    if not listen.startswith(UNIX):
        split(setting, listen)
    if has_tls or is_insecure or is_local(listen):
        return
    raise bad_setting(
        setting,
        f"{listen} can be reached from other hosts and would be served in plaintext: give a certificate and its key "
        "(TLS), listen on 127.0.0.1 or unix:/path, or set --insecure if the network itself is protected",
    )
