"""The settings of an HTTP edge, their check, and their conversion to environment variables for a child process.

Every field is a flag `--field-name` of `sluice edge` and an environment variable, see `variable`. Those of the HTTP
side are options of `sluice serve` too, which passes them on.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sluice_server.engine.config import option
from sluice_server.services.config import DEFAULTS, ServiceConfig, as_text, bad_setting
from sluice_server.services.edge.settings import HttpSettings
from sluice_server.services.process.listening import check_plaintext, is_local, split

EDGE = "edge"  # where the processes of the ring name their role
PREFIX = "SLUICE_EDGE_"
# Variables that other client commands have too. They differ from those of `serve`, which name the server's own files.
SHARED = {
    "address": "SLUICE_ADDRESS",
    "tls": "SLUICE_CLIENT_TLS",
    "tls_ca": "SLUICE_CLIENT_TLS_CA",
    "tls_cert": "SLUICE_CLIENT_TLS_CERT",
    "tls_key": "SLUICE_CLIENT_TLS_KEY",
}
# Settings of equal name and meaning in `serve`.
OF_SERVE = (
    *("allowed_origins", "allowed_hosts", "root_path", "access_log"),
    *("insecure", "grace_s", "metrics_host", "otlp_endpoint", "log_level", "log_format"),
)
EVERY = "*"
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\*")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def _same(name: str) -> Any:  # noqa: ANN401 # typed as the value, like dataclasses.field itself
    """Returns a field with default and help of the service's setting of that name."""
    (found,) = (one for one in dataclasses.fields(ServiceConfig) if one.name == name)
    return option(found.default, found.metadata["help"])


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeSettings:
    """Settings of one edge: the server behind it, its HTTP side, and its process."""

    address: str = option("127.0.0.1:50051", "host:port of the server, or unix:/path")
    listen: str = option("127.0.0.1:8000", "host:port for HTTP; port 0 takes a free one")
    https_cert: str = option("", "PEM certificate of the HTTP side; read again when it changes")
    https_key: str = option("", "PEM key of --https-cert")
    https_client_ca: str = option(
        "", "PEM authorities of HTTP clients' certificates; clients must then show one (mTLS)"
    )
    insecure: bool = option(DEFAULTS.insecure, "serve other hosts in plaintext")
    allowed_origins: str = _same("allowed_origins")
    allowed_hosts: str = _same("allowed_hosts")
    root_path: str = _same("root_path")
    access_log: bool = _same("access_log")
    tls: bool = option(False, "use TLS to the server")
    tls_ca: str = option("", "PEM authorities of the server; default: the host's")
    tls_cert: str = option("", "PEM certificate of this client (mTLS)")
    tls_key: str = option("", "PEM key of --tls-cert")
    grace_s: float = option(DEFAULTS.grace_s, "seconds that running answers get to finish after SIGTERM")
    process_id: str = option(f"{EDGE}-0", "this process's name in logs, metrics and heartbeats")
    shares_port: bool = option(False, "let several edges listen on one port")
    heartbeat_dir: str = _same("heartbeat_dir")
    metrics_port: int = option(DEFAULTS.metrics_port, "port of a Prometheus endpoint beside /metrics; 0 is off")
    metrics_host: str = option(DEFAULTS.metrics_host, "host on which that endpoint listens; it requires no key")
    otlp_endpoint: str = option(DEFAULTS.otlp_endpoint, "OTLP/gRPC collector for metrics, http://host:port")
    log_level: str = _same("log_level")
    log_format: str = _same("log_format")


def variable(name: str) -> str:
    """Returns the environment variable of a field."""
    return SHARED.get(name, PREFIX + name.upper())


def to_environment(settings: EdgeSettings) -> dict[str, str]:
    """Returns the settings as environment variables, by which a supervisor passes them to an edge."""
    return {variable(name): as_text(value) for name, value in dataclasses.asdict(settings).items()}


def check_http(settings: EdgeSettings | ServiceConfig) -> None:
    """Raise ServiceError naming the first setting of the HTTP side that is malformed."""
    for origin in _listed(settings.allowed_origins):
        if origin != EVERY and urlsplit(origin)._replace(path="", query="", fragment="").geturl() != origin:
            raise bad_setting("allowed_origins", f"{origin!r} is not scheme://host, scheme://host:port or *")
        if origin != EVERY and not urlsplit(origin).hostname:
            raise bad_setting("allowed_origins", f"{origin!r} is not scheme://host, scheme://host:port or *")
    for host in _listed(settings.allowed_hosts):
        if not _HOST.fullmatch(host):
            raise bad_setting("allowed_hosts", f"{host!r} is not a name in small letters without a port, *.name or *")
    if settings.root_path and not _PATH.fullmatch(settings.root_path):
        raise bad_setting("root_path", f"{settings.root_path!r} is not a path as /name, without a slash at its end")


def check(settings: EdgeSettings) -> None:
    """Raise ServiceError naming the first setting that cannot be used."""
    split("listen", settings.listen)
    check_plaintext("listen", settings.listen, bool(settings.https_cert), settings.insecure)
    if bool(settings.https_cert) != bool(settings.https_key):
        raise bad_setting("https_cert", "and --https-key are needed together")
    if settings.https_client_ca and not settings.https_cert:
        raise bad_setting("https_client_ca", "needs --https-cert and --https-key")
    check_http(settings)


def http_settings(settings: EdgeSettings) -> HttpSettings:
    """Returns the settings of the application. An edge that only this host reaches answers no other names unless they
    are listed: pages of other sites could otherwise call it through a name that leads to this host."""
    hosts = _listed(settings.allowed_hosts) or (() if is_local(settings.listen) else (EVERY,))
    origins = _listed(settings.allowed_origins)
    return HttpSettings(origins, hosts, settings.root_path, settings.access_log)


def edge_of(service: ServiceConfig, address: str, process_id: str, *, metrics_port: int) -> EdgeSettings:
    """Returns the settings of one edge of a service, in front of the gateway at `address`."""
    return EdgeSettings(
        address=address,
        listen=service.http,
        https_cert=service.tls_cert,
        https_key=service.tls_key,
        https_client_ca=service.tls_client_ca,
        process_id=process_id,
        shares_port=service.gateways > 1,
        heartbeat_dir=service.heartbeat_dir,
        metrics_port=metrics_port,
        **{name: getattr(service, name) for name in OF_SERVE},
    )


def url(listen: str, *, has_tls: bool) -> str:
    """Returns the address of the HTTP side for clients."""
    return f"{'https' if has_tls else 'http'}://{listen}"


def path_of(setting: str) -> Path | None:
    """Returns a setting as a path; None for ""."""
    return Path(setting) if setting else None


def _listed(setting: str) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in setting.split(","))))
