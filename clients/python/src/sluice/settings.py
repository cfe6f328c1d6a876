"""How a client reaches its servers: addresses, TLS, key, retry policy, and the arguments of its channels."""

import dataclasses
import ipaddress
import json
import os
from collections.abc import Sequence
from pathlib import Path

import grpc

from sluice.retry import RetryPolicy
from sluice.tracing import Trace, current_trace

MAX_RECEIVE_BYTES = 64 << 20  # the largest message that a server sends
_RESOLVED = ("dns:", "ipv4:", "ipv6:")  # names and lists of addresses that grpc itself resolves
_READS = {
    "sluice.v1.InferenceService": (
        "Tokenize",
        "Detokenize",
        "Embed",
        "Classify",
        "Rerank",
        "Score",
        "CancelGeneration",
    ),
    "sluice.v1.ControlService": ("ListModels", "GetModel", "ListAdapters", "GetServerInfo", "GetLoad"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. Without `ca` the host's authorities are trusted; `certificate` and `key` enable mTLS."""

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError for a file that cannot be read, ValueError for a certificate or key alone."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are needed together")
        files = [None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)]
        return grpc.ssl_channel_credentials(*files)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a client.

    Attributes:
        targets: host:port of each server, or another address that grpc resolves.
        tls: None is plaintext.
        token: sent as a bearer token with each call.
        channels: the most connections; opened as calls overlap, so that gateways that share a port share the work.
        timeout_s: timeout of calls without one of their own.
    """

    targets: tuple[str, ...]
    tls: Tls | None = None
    token: str | None = None
    channels: int = 4
    timeout_s: float | None = None
    retry: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)
    trace: Trace = current_trace

    def __post_init__(self) -> None:
        """Raises ValueError if a key would be sent in plaintext to another host."""
        if not self.targets or self.channels < 1:
            raise ValueError("a client needs an address and at least one channel")
        for target in self.targets:
            if self.token and self.tls is None and not _is_local(target):
                raise ValueError(f"the token would be sent to {target} in plaintext: give tls=sluice.Tls()")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call made now."""
        return (*([("authorization", f"Bearer {self.token}")] if self.token else []), *self.trace())


def targets_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses as a tuple, from one or several."""
    return (target,) if isinstance(target, str) else tuple(target)


def channel_options(number: int, num_targets: int = 1, target: str = "") -> tuple[tuple[str, int | str], ...]:
    """Arguments of the channel of this number. grpc ignores unknown keys silently; a test looks each up in its binary.

    HTTP/2 windows are small: when a reader stops, thousands of messages would otherwise pile up in the transport.
    Where there are other addresses to go to, one that is silent is left sooner. A `target` that grpc resolves to
    several addresses has its calls spread over them.
    """
    keepalive_ms = 5_000 if num_targets > 1 else 30_000
    return (
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 65536),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", min(keepalive_ms, 10_000)),
        (
            "grpc.http2.ping_timeout_ms",
            min(keepalive_ms, 10_000),
        ),  # the default of a minute would override the line above
        (
            "grpc.http2.max_pings_without_data",
            0,
        ),  # a client that only reads sends no data: it would ping twice and stop
        ("grpc.service_config", _service_config(spreads=target.startswith(_RESOLVED))),
        ("sluice.connection", number),  # unknown to grpc: channels with equal arguments would share a connection
    )


def _service_config(*, spreads: bool) -> str:
    """Lets grpc itself repeat calls that change nothing; a generation is repeated or resumed by its stream. `spreads`:
    calls take the addresses of the channel's name by turns, instead of the first one that answers."""
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.05s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": service, "method": method} for service, methods in _READS.items() for method in methods]
    config: dict[str, object] = {"methodConfig": [{"name": names, "retryPolicy": policy}]}
    return json.dumps(config | ({"loadBalancingConfig": [{"round_robin": {}}]} if spreads else {}))


def _is_local(target: str) -> bool:
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
