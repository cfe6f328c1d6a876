"""Writes Grafana's dashboards (deploy/grafana/dashboards) from the table below: `python -m tools.dashboards`.

A panel is a title, a unit and queries; the rest of Grafana's JSON follows from these. A test compares the files with
the table, and the queries with the catalogue of metrics.
"""

import json
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).parents[1] / "deploy/grafana/dashboards"
WIDTH, HEIGHT = 12, 8  # of a panel, on a grid with 24 columns
WINDOW = "$__rate_interval"


class DashboardPanel(NamedTuple):
    """One graph; `queries` are (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def quantiles(title: str, metric: str, by: str = "") -> DashboardPanel:
    """Returns a panel with p50, p90 and p99 of a histogram of seconds."""
    groups = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    queries = tuple(
        (f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket[{WINDOW}])))", f"p{round(q * 100)}{legend}")
        for q in (0.5, 0.9, 0.99)
    )
    return DashboardPanel(title, "s", queries)


def rates(title: str, metric: str, by: str, unit: str = "ops") -> DashboardPanel:
    """Returns a panel with the rate of a counter, by a label."""
    return DashboardPanel(title, unit, ((f"sum by ({by}) (rate({metric}[{WINDOW}]))", f"{{{{{by}}}}}"),))


def one(title: str, unit: str, query: str, legend: str) -> DashboardPanel:
    """Returns a panel with one query."""
    return DashboardPanel(title, unit, ((query, legend),))


DASHBOARDS: dict[str, tuple[DashboardPanel, ...]] = {
    "latency": (
        quantiles("Time to first token", "gen_ai_server_time_to_first_token_seconds"),
        quantiles("Between two tokens", "sluice_inter_token_latency_seconds"),
        quantiles("Per output token", "gen_ai_server_time_per_output_token_seconds"),
        quantiles("Whole request", "gen_ai_server_request_duration_seconds", "operation"),
        quantiles("In the queue", "sluice_queue_time_seconds", "tenant"),
        quantiles("Prefill", "sluice_prefill_time_seconds"),
        quantiles("Decode", "sluice_decode_time_seconds"),
        quantiles("Between processes", "sluice_ring_lag_seconds", "role"),
    ),
    "throughput": (
        one("Output tokens a second", "short", "sluice:output_tokens:rate1m", "output"),
        one("Prompt tokens a second", "short", "sluice:prompt_tokens:rate1m", "prompt"),
        rates("Requests by status", "sluice_requests_total", "code", "reqps"),
        rates("Tokens by kind", "sluice_tokens_total", "kind"),
        one(
            "Tokens computed",
            "short",
            f"sum by (process) (rate(sluice_engine_tokens_computed_total[{WINDOW}]))",
            "{{process}}",
        ),
        DashboardPanel(
            "Tokens of a request",
            "short",
            tuple(
                (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[{WINDOW}])))", f"{part} p{round(q * 100)}")
                for part, metric in (
                    ("prompt", "sluice_request_prompt_tokens"),
                    ("output", "sluice_request_output_tokens"),
                )
                for q in (0.5, 0.99)
            ),
        ),
        rates("Ends by reason", "sluice_requests_total", "reason", "reqps"),
        one("Memory", "bytes", "process_resident_memory_bytes", "{{instance}}"),
    ),
    "cache": (
        one("Blocks in use", "percentunit", "sluice:cache_usage:ratio", "{{process}}"),
        one("Blocks by tier", "short", "sum by (tier, state) (sluice_cache_blocks)", "{{tier}} {{state}}"),
        one("Prompt tokens found", "percentunit", "sluice:prefix_hits:ratio5m", "hit rate"),
        rates("Evictions", "sluice_cache_evictions_total", "process"),
        one("Tokens looked for", "short", f"sum(rate(sluice_prefix_query_tokens_total[{WINDOW}]))", "looked for"),
        rates("Computed once more", "sluice_recomputed_tokens_total", "process"),
    ),
    "memory": (
        one("What processes hold", "bytes", "sum by (process, kind) (sluice_memory_bytes)", "{{process}} {{kind}}"),
        one("Control group", "bytes", "max by (what) (sluice_memory_group_bytes)", "{{what}}"),
        one("Level (1: short, 2: critical)", "short", "sluice_memory_level", "{{process}}"),
        one("Until memory is used up", "s", "min(sluice_memory_exhaustion_seconds)", "seconds"),
        one("Until the cache is full", "s", "sluice_cache_exhaustion_seconds", "{{process}}"),
        one("Cache blocks in use that hold nothing", "percentunit", "sluice_cache_waste_ratio", "{{process}}"),
        one("Stalled for memory", "percentunit", "max(sluice_memory_stalled_ratio)", "share of time"),
        one("Killed for memory", "short", "max(sluice_memory_oom_kills)", "kills"),
        one(
            "Weights read by steps, bytes a second",
            "Bps",
            "sum by (process) (sluice_weights_offloaded_bytes)"
            f" * sum by (process) (rate(sluice_engine_steps_total[{WINDOW}]))",
            "{{process}}",
        ),
        one(
            "Share of time waiting for weights",
            "percentunit",
            f"sum by (process) (rate(sluice_weights_wait_seconds_total[{WINDOW}]))",
            "{{process}}",
        ),
    ),
    "gpu": (
        one("Memory of GPUs", "bytes", "max by (gpu, what) (sluice_gpu_memory_bytes)", "{{gpu}} {{what}}"),
        one("Share of time with a kernel", "percentunit", "max by (gpu) (sluice_gpu_busy_ratio)", "{{gpu}}"),
        one("Power", "watt", "max by (gpu) (sluice_gpu_power_watts)", "{{gpu}}"),
        one(
            "Energy for each output token",
            "joule",
            f"sum(max by (gpu) (rate(sluice_gpu_energy_joules_total[{WINDOW}])))"
            f' / sum(rate(sluice_tokens_total{{kind="completion"}}[{WINDOW}]))',
            "joules",
        ),
    ),
    "scheduling": (
        one("Running", "short", "sum by (process) (sluice_requests_running)", "{{process}}"),
        one("Waiting", "short", "sum by (process) (sluice_requests_waiting)", "{{process}}"),
        one("Open, by stage", "short", "sum by (role) (sluice_requests_open)", "{{role}}"),
        rates("Preemptions by way", "sluice_preemptions_total", "way"),
        quantiles("Step", "sluice_engine_step_time_seconds", "process"),
        rates("What steps go to", "sluice_engine_step_part_seconds_total", "part", "percentunit"),
        DashboardPanel(
            "Tokens of a step",
            "short",
            ((f"histogram_quantile(0.5, sum by (le) (rate(sluice_engine_step_tokens_bucket[{WINDOW}])))", "p50"),),
        ),
        one("Tokens that open requests may use", "short", "sum(sluice_reserved_tokens)", "reserved"),
        one(
            "Ranks: share of steps in sums",
            "percentunit",
            f'sum by (process, rank) (rate(sluice_rank_seconds_total{{part="sums"}}[{WINDOW}])) / '
            f'sum by (process, rank) (rate(sluice_rank_seconds_total{{part="steps"}}[{WINDOW}]))',
            "{{process}} rank {{rank}}",
        ),
        one(
            "Ranks: between the fastest and the slowest",
            "s",
            f"sum by (process) (rate(sluice_rank_skew_seconds_total[{WINDOW}]))",
            "{{process}}",
        ),
    ),
    "speculation": (
        rates("Drafted, by place", "sluice_drafted_tokens_total", "place"),
        rates("Kept, by place", "sluice_accepted_tokens_total", "place"),
        one(
            "Share that is kept",
            "percentunit",
            f"sum(rate(sluice_accepted_tokens_total[{WINDOW}])) / sum(rate(sluice_drafted_tokens_total[{WINDOW}]))",
            "kept",
        ),
        one("Requests with a grammar", "short", "sum(sluice_grammar_open)", "open"),
        one("Grammars being compiled", "short", "sum(sluice_grammar_waiting)", "waiting"),
    ),
    "images": (
        rates("Images by what happened", "sluice_images_total", "what"),
        rates("Time spent on images", "sluice_image_seconds_total", "part", "percentunit"),
        one(
            "Share whose rows were found",
            "percentunit",
            f'sum(rate(sluice_images_total{{what="found"}}[{WINDOW}])) / '
            f'sum(rate(sluice_images_total{{what=~"found|encoded"}}[{WINDOW}]))',
            "found",
        ),
        one(
            "Seconds to encode one",
            "s",
            f'sum(rate(sluice_image_seconds_total{{part="encode"}}[{WINDOW}])) / '
            f'sum(rate(sluice_images_total{{what="encoded"}}[{WINDOW}]))',
            "encode",
        ),
        one(
            "Seconds to prepare one",
            "s",
            f'sum(rate(sluice_image_seconds_total{{part="prepare"}}[{WINDOW}])) / '
            f'sum(rate(sluice_images_total{{what=~"prepared|refused"}}[{WINDOW}]))',
            "prepare",
        ),
        one(
            "Tokens of images a second", "short", f'sum(rate(sluice_tokens_total{{kind="image"}}[{WINDOW}]))', "tokens"
        ),
    ),
    "adapters": (
        one("Adapters, by place", "short", "sum by (where) (sluice_adapters)", "{{where}}"),
        one("Bytes, by place", "bytes", "sum by (where) (sluice_adapters_bytes)", "{{where}}"),
        rates("Reads, loads, evictions", "sluice_adapter_loads_total", "what"),
        quantiles("Waiting for an adapter", "sluice_adapter_wait_seconds"),
        one(
            "Seconds of reading, a second",
            "short",
            f"sum by (process) (rate(sluice_adapter_read_seconds_total[{WINDOW}]))",
            "{{process}}",
        ),
    ),
    "errors": (
        one("Share of requests that fail", "percentunit", "sluice:errors:ratio5m", "failed"),
        one(
            "Requests that did not end well",
            "reqps",
            f'sum by (code, reason) (rate(sluice_requests_total{{code!="OK"}}[{WINDOW}]))',
            "{{code}} {{reason}}",
        ),
        rates("Not let in", "sluice_refusals_total", "reason", "reqps"),
        rates("Ends in the engine", "sluice_engine_requests_total", "end"),
        rates("Frames that were not as they should be", "sluice_ring_in_total", "what"),
        rates("Spans", "sluice_spans_total", "outcome"),
    ),
}


def dashboard(name: str, panels: tuple[DashboardPanel, ...]) -> dict[str, object]:
    """Returns Grafana's JSON of one dashboard."""
    source = {"type": "prometheus", "uid": "prometheus"}
    shown = [
        {
            "id": i + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {"x": i % 2 * WIDTH, "y": i // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {"refId": chr(ord("A") + j), "datasource": source, "expr": expr, "legendFormat": legend}
                for j, (expr, legend) in enumerate(panel.queries)
            ],
        }
        for i, panel in enumerate(panels)
    ]
    return {
        "uid": f"sluice-{name}",
        "title": f"sluice: {name}",
        "tags": ["sluice"],
        "schemaVersion": 41,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["sluice"], "title": "sluice", "asDropdown": True}],
        "panels": shown,
    }


def text_of(name: str) -> str:
    """Returns the contents of a dashboard's file."""
    return json.dumps(dashboard(name, DASHBOARDS[name]), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all dashboards."""
    for name in DASHBOARDS:
        (TARGET / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    main()
