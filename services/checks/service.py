"""Checks of the settings of a service: limits, keys, where images come from, and telemetry."""

import os
from pathlib import Path

from sluice_server.services.checks.values import at_least, one_of, seconds
from sluice_server.services.config import MAX_HEDGING_DELAY_MS, MAX_TEXT_INTERVAL_MS, WORKER, ServiceConfig, bad_setting
from sluice_server.services.media.urls import hosts_of
from sluice_server.services.messages.processes import Role
from sluice_server.services.sections import reasoning, tools


def check_service(service: ServiceConfig) -> None:
    """Raise ServiceError naming the first setting that is out of range."""
    for name in (
        *("gateways", "tokenizers", "detokenizers", "encoding_threads", "max_open_requests", "max_prompt_bytes"),
        *("media_workers", "max_open_image_bytes"),
    ):
        at_least(name, getattr(service, name), 1)
    for name in ("image_store_bytes", "max_restarts", "memory_budget"):
        at_least(name, getattr(service, name), 0)
    for name, most in (("text_interval_ms", MAX_TEXT_INTERVAL_MS), ("hedging_delay_ms", MAX_HEDGING_DELAY_MS)):
        value = getattr(service, name)
        if not 0.0 <= value <= most:
            raise bad_setting(name, f"{value:g} is not in [0, {most:g}]")
    for name in (
        "probe_interval_s",
        "probe_timeout_s",
        "recovery_timeout_s",
        "grace_s",
        "max_connection_age_s",
        "model_wait_s",
    ):
        seconds(name, getattr(service, name))
    one_of("role", service.role, ("", *Role, WORKER))
    one_of("tool_call_parser", service.tool_call_parser, tools.NAMES)
    one_of("reasoning_parser", service.reasoning_parser, reasoning.NAMES)
    check_keys(service)
    _check_media_from(service.media_from)
    _check_telemetry(service)


def check_keys(service: ServiceConfig) -> None:
    """Raise ServiceError for keys that no client could send, and beside an access file."""
    if service.api_key and service.access_file:
        raise bad_setting("api_key", "and --access-file exclude each other: `sluice token new` makes keys for the file")
    if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in service.api_key):
        raise bad_setting("api_key", "a key is empty, or has a character that is a space or not printable ASCII")


def _check_media_from(text: str) -> None:
    try:
        hosts_of(text)
    except ValueError as error:
        raise bad_setting("media_from", str(error)) from None


def _check_telemetry(service: ServiceConfig) -> None:
    one_of("log_level", service.log_level, ("debug", "info", "warning", "error"))
    if service.audit_log and service.role in ("", Role.GATEWAY):
        where = Path(service.audit_log)
        if where.is_dir() or not os.access(where if where.exists() else where.parent, os.W_OK):
            raise bad_setting("audit_log", f"cannot write to {where}")
    if service.log_prompts and not service.log_requests:
        raise bad_setting("log_prompts", "needs --log-requests: prompts are part of its lines")
    seconds("trace_slow_s", service.trace_slow_s)
    if not 0.0 <= service.trace_sample_ratio <= 1.0:
        raise bad_setting("trace_sample_ratio", f"{service.trace_sample_ratio} is not in [0, 1]")
    if not 0.01 <= service.memory_warn_share <= 0.9:
        raise bad_setting("memory_warn_share", f"{service.memory_warn_share} is not in [0.01, 0.9]")
    one_of("log_format", service.log_format, ("console", "json"))
    if not 0 <= service.metrics_port <= 65000:
        raise bad_setting("metrics_port", f"{service.metrics_port} is not in [0, 65000]")
