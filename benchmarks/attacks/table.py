"""The attacks by name. One that is new is a function of a `Target`, and a row here."""

import dataclasses
from collections.abc import Callable

from benchmarks.attacks import http2
from benchmarks.attacks.http2 import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """What it does, at which rate, and the function that does it."""

    says: str
    rate: float  # a second, or how many
    does: Callable[[Target, float], None]
    over_tls: bool = False  # the gateway has a certificate, and the neighbour calls it over TLS

    def run(self, target: Target) -> None:
        """Do it until the target's time is over."""
        self.does(target, self.rate)


ATTACKS = {
    "bad_paths": Attack("HEADERS with a path that is not UTF-8, a connection each", 4, http2.bad_paths),
    "rapid_reset": Attack("HEADERS and RST_STREAM on 16 connections", 68_000, http2.rapid_reset),
    "patient_rapid_reset": Attack(
        "the same, on each connection once the server has answered", 68_000, http2.patient_rapid_reset
    ),
    "calls": Attack("whole calls of Health.Check on one connection", 2_000, http2.calls),
    "pings": Attack("PING frames on one connection", 50_000, http2.PINGS),
    "settings": Attack("SETTINGS frames on one connection", 50_000, http2.SETTINGS_FRAMES),
    "window_updates": Attack("WINDOW_UPDATE frames on one stream", 50_000, http2.WINDOW_UPDATES),
    "empty_data": Attack("empty DATA frames on one stream", 50_000, http2.EMPTY_DATA),
    "continuations": Attack("CONTINUATION frames of one HEADERS without end", 5_000, http2.CONTINUATIONS),
    "connections": Attack("connections that only begin HTTP/2, held", 500, http2.connections),
    "detached": Attack("generations with DETACH, left after a token", 100, http2.detached),
    "silent": Attack("connections on which nothing is said, held", 500, http2.silent),
    "half_open_tls": Attack(
        "handshakes of TLS that stop behind the client's first message, held", 500, http2.half_open_tls, over_tls=True
    ),
}
