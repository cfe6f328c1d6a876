"""Renders the metrics as a Markdown page, from `services.telemetry.catalogue`. Pure."""

from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.catalogue import Metric


def page() -> str:
    """Returns the whole page."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated from services/telemetry/catalogue.py by `make reference`. Do not edit. -->",
        "",
        "Every process serves its metrics to Prometheus (`--metrics-port` and the ports behind it) and exports the",
        "same over OTLP (`--otlp-endpoint`). Every sample also carries the role and the id of its process. A histogram",
        "has `_bucket`, `_sum` and `_count` behind its Prometheus name.",
        "",
        "| Prometheus | OpenTelemetry | kind | unit | labels | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(metric) for metric in catalogue.ALL),
    ]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    kind = metric.kind.name.lower()
    return f"| `{metric.prometheus}` | `{metric.name}` | {kind} | {metric.unit} | {labels} | {metric.help} |"
