"""The process of an HTTP edge: title, signals, heartbeat, metrics, and the server in front of one gRPC channel.

It has no role in the ring. A supervisor runs one in front of each gateway; `sluice edge` runs one alone.
"""

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import setproctitle
import uvloop
from prometheus_client import generate_latest
from starlette.types import ASGIApp

from sluice_server.engine.worker.host.slices import SHORT_S, take_turns_of
from sluice_server.services.config import bad_setting
from sluice_server.services.edge.app import build
from sluice_server.services.edge.connections import Bounds
from sluice_server.services.edge.observed import HttpObserver
from sluice_server.services.edge.server import EdgeServer, HttpsFiles, server_of
from sluice_server.services.process.edge_settings import EDGE, EdgeSettings, http_settings, path_of, url
from sluice_server.services.process.heartbeat import BEAT_S, Heartbeat
from sluice_server.services.process.listening import bound, split
from sluice_server.services.process.supervised import die_with_supervisor, say_ready
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry import catalogue, logs, names
from sluice_server.services.telemetry.metrics import Metrics, MetricSample
from sluice_server.services.telemetry.prometheus import registry_of
from sluice_server.services.telemetry.prometheus import serve as serve_metrics
from sluice_server.services.telemetry.push import pushing

MAX_CONNECTIONS = 4096
OTHER_FILES = 64  # files that the process has open besides its clients' connections
SHARE_OF_ADDRESS = 4  # one address may take a quarter of the connections
LAST_WORDS_S = 2.0  # after the gateway has ended what ran, which it does within its own grace


class EdgeMetrics(HttpObserver):
    """Counts requests, and shows the metrics of the process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._num_active = 0
        self._registry = registry_of(metrics)
        metrics.collect_from(lambda: [MetricSample(catalogue.HTTP_ACTIVE, self._num_active)])

    def began(self) -> None:
        """Counts a request that is being answered."""
        self._num_active += 1

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an answer and its time."""
        self._num_active -= 1
        self._metrics.observe(catalogue.HTTP_DURATION, seconds, route, method, str(status))

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


def run_edge(settings: EdgeSettings, open_channel: Callable[[], grpc.aio.Channel]) -> int:
    """Run an edge until it is asked to stop. Returns its exit status. `open_channel` is called in its loop. Raises
    ServiceError for unusable settings."""
    setproctitle.setproctitle(f"sluice: {settings.process_id}")
    logs.configure(settings.log_level, settings.log_format, settings.process_id)
    die_with_supervisor()
    take_turns_of(SHORT_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, open_channel))
    return 0


async def _run(settings: EdgeSettings, open_channel: Callable[[], grpc.aio.Channel]) -> None:
    metrics = Metrics(EDGE, settings.process_id)
    labels = {"service.name": names.SERVICE_NAME, "service.instance.id": settings.process_id, names.ROLE: EDGE}
    if settings.metrics_port:
        serve_metrics(metrics, settings.metrics_host, settings.metrics_port)
    async with open_channel() as channel, pushing(metrics, labels, settings.otlp_endpoint):
        app = build(channel, http_settings(settings), EdgeMetrics(metrics))
        https = _https_files(settings)
        server = _server(settings, app, https)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        with _listening(settings) as opened, contextlib.closing(_heart(settings)) as heart:
            server.on_started = lambda: _say_listening(settings, opened)
            serving = asyncio.create_task(server.serve(sockets=[opened]), name="HTTP server")
            certificate = None if https is None else _watched(server, https)
            while not serving.done():
                heart.beat()
                if certificate is not None:
                    certificate.refresh()
                await asyncio.wait((serving,), timeout=BEAT_S)
            serving.result()


def _server(settings: EdgeSettings, app: ASGIApp, https: HttpsFiles | None) -> EdgeServer:
    try:
        return server_of(app, _bounds(), grace_s=settings.grace_s + LAST_WORDS_S, https=https)
    except OSError as error:
        assert https is not None
        text = f"{https.certificate} and {https.key} cannot be used: {error.strerror}"
        raise bad_setting("https_cert", text) from None


def _https_files(settings: EdgeSettings) -> HttpsFiles | None:
    if not settings.https_cert:
        return None
    return HttpsFiles(Path(settings.https_cert), Path(settings.https_key), path_of(settings.https_client_ca))


def _watched(server: EdgeServer, https: HttpsFiles) -> WatchedFile[None]:
    """Returns the certificate's files; the server reads them again when they change."""

    def read() -> None:
        try:
            server.read_certificate(https)
        except OSError as error:
            raise bad_setting("https_cert", f"{https.certificate} and {https.key}: {error.strerror}") from None

    return WatchedFile((https.certificate, https.key), read)


def _listening(settings: EdgeSettings) -> socket.socket:
    """Returns the bound socket. Raises ServiceError."""
    host, port = split("listen", settings.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=settings.shares_port)
    except OSError as error:
        raise bad_setting("listen", f"cannot listen on {settings.listen}: {error.strerror}") from None


def _heart(settings: EdgeSettings) -> Heartbeat:
    try:
        return Heartbeat(settings.heartbeat_dir, settings.process_id)
    except OSError as error:
        raise bad_setting("heartbeat_dir", f"cannot write to {settings.heartbeat_dir}: {error.strerror}") from error


def _say_listening(settings: EdgeSettings, opened: socket.socket) -> None:
    """Tell the supervisor, or else who waits for a line, where this edge listens."""
    address = url(bound(settings.listen, opened.getsockname()[1]), has_tls=bool(settings.https_cert))
    if not say_ready(settings.process_id, address):
        print(f"sluice: edge on {address} for {settings.address}", flush=True)


def _bounds() -> Bounds:
    """Raise the limit of open files to the system's hard limit, and return the number of connections that it allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, hard - OTHER_FILES))
    return Bounds(most, max(1, most // SHARE_OF_ADDRESS))
