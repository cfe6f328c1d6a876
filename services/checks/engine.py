"""Checks of how an engine computes: its limits, formats, drafts and adapters."""

from pathlib import Path

from sluice_server.engine.config import ATTENTION_BACKENDS, CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from sluice_server.engine.parallel.options import check_parallel
from sluice_server.engine.request import MAX_DRAFT_TOKENS, MAX_DRAFT_WIDTH
from sluice_server.engine.scheduler.policies import POLICIES
from sluice_server.engine.scheduler.settings import parse_weights
from sluice_server.services.checkpoint.adapter_hub import allowed_of
from sluice_server.services.checks.values import at_least, one_of, seconds
from sluice_server.services.config import bad_setting


def check_engine(engine: EngineConfig) -> None:
    """Raise ServiceError naming the first setting that is out of range."""
    for name in ("max_queued_requests", "max_queued_tokens"):
        at_least(name, getattr(engine, name), 1)
    for name in (
        *("max_num_seqs", "max_num_batched_tokens"),
        *("max_model_len", "threads", "max_num_pooling_tokens"),
        *("max_adapters", "adapter_bytes", "adapter_host_bytes"),
    ):
        at_least(name, getattr(engine, name), 0)
    for name in (
        "priority_ageing_s",
        "starvation_bound_s",
        "pause_hold_s",
        "disk_cache_ttl_s",
        "disk_cache_save_s",
        "adapter_turn_s",
    ):
        seconds(name, getattr(engine, name))
    if not -10.0 <= engine.admission_watermark <= 0.9:
        raise bad_setting("admission_watermark", f"{engine.admission_watermark} is not in [-10, 0.9]")
    if not 0.01 <= engine.encoder_share <= 10.0:
        raise bad_setting("encoder_share", f"{engine.encoder_share} is not in [0.01, 10]")
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise bad_setting("gpu_memory_utilization", f"{engine.gpu_memory_utilization} is not in (0, 1]")
    parse_weights(engine.tenant_weights)
    _check_adapters(engine)
    _check_speculation(engine)
    check_parallel(engine)
    one_of("scheduling_policy", engine.scheduling_policy, tuple(POLICIES))
    one_of("device", engine.device, ("auto", "cpu", "cuda"))
    one_of("dtype", engine.dtype, ("auto", "float32", "bfloat16"))
    one_of("quantization", engine.quantization, QUANTIZATIONS)
    one_of("kv_cache_dtype", engine.kv_cache_dtype, ("auto", *CACHE_DTYPES))
    one_of("attention_backend", engine.attention_backend, ATTENTION_BACKENDS)


def _check_speculation(engine: EngineConfig) -> None:
    one_of("draft_length", engine.draft_length, ("adaptive", "fixed"))
    one_of("speculation", engine.speculation, ("none", "ngram", "grammar", "draft", "eagle"))
    if not 1 <= engine.max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise bad_setting("max_draft_tokens", f"{engine.max_draft_tokens} is not in [1, {MAX_DRAFT_TOKENS}]")
    if not 1 <= engine.max_draft_width <= MAX_DRAFT_WIDTH:
        raise bad_setting("max_draft_width", f"{engine.max_draft_width} is not in [1, {MAX_DRAFT_WIDTH}]")
    if engine.max_draft_width > 1 and engine.speculation not in ("draft", "eagle"):
        raise bad_setting("max_draft_width", "above 1 needs --speculation draft or eagle: nothing else branches")
    wants_draft = engine.speculation in ("draft", "eagle")
    if wants_draft and not engine.draft_model:
        raise bad_setting("draft_model", f"names no checkpoint, and --speculation {engine.speculation} drafts with one")
    if engine.draft_model and not wants_draft:
        raise bad_setting("draft_model", "is used with --speculation draft or eagle only: give that, too")


def _check_adapters(engine: EngineConfig) -> None:
    has_source = bool(engine.adapter_dir or engine.adapter_hub)
    if has_source and not engine.max_adapters:
        raise bad_setting(
            "max_adapters", "is 0, which takes none: say how many may run at once, such as --max-adapters 8"
        )
    if engine.max_adapters and not has_source:
        raise bad_setting(
            "max_adapters", f"is {engine.max_adapters}: say where they are, by --adapter-dir or --adapter-hub"
        )
    try:
        allowed_of(engine.adapter_hub)
    except ValueError as error:
        raise bad_setting("adapter_hub", f"{str(error)!r} is no ORG/NAME and no ORG/*") from None
    if engine.adapter_dir and not Path(engine.adapter_dir).is_dir():
        raise bad_setting("adapter_dir", f"there is no directory {engine.adapter_dir!r}: make it, or name another")
