"""The table of metrics for users of vLLM: complete, with existing names and labels."""

import re
from pathlib import Path

import yaml

from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.catalogue import Metric, MetricKind

ROOT = Path(__file__).parents[3]

# What vLLM's own Grafana dashboards ask for, and what its documentation lists of queues, cache and speculation; not
# what belongs to its own parts (multi-modal cache, LoRA slots, sleep).
THEIRS = {
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "time_to_first_token_seconds",
}


def rows() -> list[tuple[list[str], list[str]]]:
    """Names in code type on the left and on the right of each row."""
    text = (ROOT / "docs/migrating-from-vllm.md").read_text()
    table = text[text.index("| vLLM | sluice |") :].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(re.findall(r"`([^`]+)`", left), re.findall(r"`([^`]+)`", right)) for left, right in cells]


def plain(name: str) -> str:
    return name.split("{")[0]


def test_it_has_every_name_of_theirs() -> None:
    assert {plain(name) for left, _ in rows() for name in left} == THEIRS


def test_every_name_of_ours_is_shown_with_those_labels() -> None:
    metrics = {metric.prometheus: metric for metric in catalogue.ALL}
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    before = ""
    for _, right in rows():
        assert right
        for name in right:
            before = plain(name) or before  # `{kind=…}` alone is of the name before it
            if before in recorded:
                continue
            labels = set(re.findall(r"[{, ]([a-z]+)", name.removeprefix(plain(name))))
            assert labels <= set(metrics[before].labels), name


def test_a_name_maps_to_its_own_kind() -> None:
    metrics: dict[str, Metric] = {metric.prometheus: metric for metric in catalogue.ALL}
    for left, right in rows():
        kinds = {metrics[plain(name)].kind for name in right if plain(name) in metrics}
        is_histogram = all(name.endswith("_seconds") or name.startswith(("request_", "iteration")) for name in left)
        if is_histogram and "success" not in left[0]:
            assert kinds == {MetricKind.HISTOGRAM}, left
        else:
            assert MetricKind.HISTOGRAM not in kinds, left
