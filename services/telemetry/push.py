"""Starts and stops the push of metrics over OTLP, for processes with an endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.tracing import endpoint_of

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextlib.asynccontextmanager
async def pushing(metrics: Metrics, resource: Mapping[str, str], otlp_endpoint: str) -> AsyncIterator[None]:
    """Push metrics while the block runs: to `otlp_endpoint`, else to OpenTelemetry's configured endpoint, else
    nowhere."""
    endpoint = endpoint_of(otlp_endpoint, ENDPOINT_VARIABLES)
    if not endpoint:
        yield
        return
    # Imported here, as most processes do not need it and start faster without.
    from sluice_server.services.telemetry.otlp_metrics import MetricPush

    push = MetricPush(metrics, resource, endpoint)
    task = asyncio.create_task(push.run(), name="push metrics")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await push.stop()
