"""Command-line options made from the two configuration dataclasses, so that each setting is defined once.

Each field becomes `--field-name` and `SLUICE_FIELD_NAME`; its help text is the field's. A value is taken from the
command line, else from the environment, else from the file of `--config`, else it is the field's default.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli import config_file
from sluice_server.services.config import ENV_PREFIX, ServiceConfig, bad_setting

CLASSES = (ServiceConfig, EngineConfig)
USUAL = "Usual options"
# The groups of the help, in order; a setting that is in none stands last.
GROUPS = {
    USUAL: (
        *("model", "models", "listen", "http", "served_model_name", "device", "dtype", "quantization"),
        *("max_model_len", "max_num_seqs", "gpu_memory_utilization"),
    ),
    "Access": ("api_key", "tls_cert", "tls_key", "tls_client_ca", "access_file", "insecure", "reflection"),
    "HTTP": ("allowed_origins", "allowed_hosts", "root_path", "access_log"),
    "Model": (
        "revision",
        "models_dir",
        "memory_budget",
        "model_wait_s",
        "weights_offload_bytes",
        "calibration",
        "plugins",
        "batch_invariant",
        "attention_backend",
        "enable_prompt_embeds",
    ),
    "Adapters": ("adapter_dir", "adapter_hub", "max_adapters", "adapter_bytes", "adapter_host_bytes", "adapter_turn_s"),
    "Scheduling": (
        *("max_num_batched_tokens", "max_num_pooling_tokens", "scheduling_policy", "priority_ageing_s"),
        *("starvation_bound_s", "tenant_weights"),
        *("admission_watermark", "max_queued_requests", "max_queued_tokens", "pause_hold_s"),
    ),
    "KV cache": (
        *(
            "kv_cache_tokens",
            "kv_cache_max_tokens",
            "kv_cache_min_tokens",
            "kv_cache_dtype",
            "block_size",
            "prefix_caching",
            "kv_events",
        ),
        *(
            "host_cache_bytes",
            "disk_cache_dir",
            "disk_cache_bytes",
            "disk_cache_ttl_s",
            "disk_cache_save_s",
            "shared_cache_bytes",
        ),
        *("kv_store", "kv_port_offset", "kv_nixl"),
    ),
    "A gateway of another project in front": ("vllm_listen", "vllm_tenant"),
    "Speculation": ("speculation", "draft_model", "draft_length", "max_draft_tokens", "max_draft_width"),
    "Ranks": ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel", "sum_shards", "allow_shared_cores"),
    "Limits and times": (
        *("max_open_requests", "max_prompt_bytes", "max_connection_age_s", "grace_s", "recovery_timeout_s"),
        *("memory_watch", "memory_warn_share"),
        *("max_restarts", "probe_interval_s", "probe_timeout_s", "text_interval_ms"),
    ),
    "Telemetry": (
        *("metrics_port", "metrics_host", "otlp_endpoint", "trace_sample_ratio", "trace_slow_s"),
        *("log_level", "log_format", "log_requests", "log_prompts", "audit_log"),
    ),
    "Processes": (
        "engines",
        "prefill_engines",
        "routing",
        "gateways",
        "tokenizers",
        "detokenizers",
        "threads",
        "encoding_threads",
        "process_templates",
    ),
    "One process alone": (
        *(
            "role",
            "process_id",
            "inbox",
            "engine_role",
            "gateway_peers",
            "tokenizer_peers",
            "engine_peers",
            "engines_file",
            "traffic_file",
        ),
        *("detokenizer_peers", "rank_peers", "ring_keys", "peer_secret", "heartbeat_dir"),
    ),
    "Further options": (),
}
CONFIG, POSITIONAL = "config", "positional_model"


def takes_settings(command: Callable[[EngineConfig, ServiceConfig], None]) -> Callable[..., None]:
    """Wrap a command that takes both configurations into one with an option for every field, `--config`, and the model
    as an argument too."""

    def run(context: typer.Context, **values: Any) -> None:  # noqa: ANN401 # types are in the signature below
        if values[POSITIONAL] is not None:
            source = context.get_parameter_source("model")
            if source is not None and source.name == "COMMANDLINE":
                raise bad_setting("model", f"the model is given as {values[POSITIONAL]!r} too; give it once")
            values["model"] = values[POSITIONAL]
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        service, engine = (cls(**{name: values[name] for name in _types(cls)}) for cls in CLASSES)
        assert isinstance(service, ServiceConfig)
        assert isinstance(engine, EngineConfig)
        command(engine, service)

    fields = {field.name: field for cls in CLASSES for field in dataclasses.fields(cls)}
    placed = [name for names in GROUPS.values() for name in names]
    groups = {**GROUPS, [*GROUPS][-1]: tuple(name for name in fields if name not in placed)}
    options = [
        parameter(fields[name], group, ENV_PREFIX + name.upper()) for group, names in groups.items() for name in names
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = inspect.Signature([context, _positional(), options[0], _config(), *options[1:]])  # type: ignore[attr-defined] # typer reads it
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _types(cls: type[Any]) -> dict[str, Any]:
    """Returns the types of the fields."""
    return {field.name: get_origin(field.type) or field.type for field in dataclasses.fields(cls)}


def parameter(field: "dataclasses.Field[Any]", group: str, variable: str) -> inspect.Parameter:
    """Returns the option of a field, as a parameter of a command."""
    names = [f"--{field.name.replace('_', '-')}"]
    if field.type is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    words = field.metadata["words"]
    parser, shown = (functools.partial(_number, words), f"INTEGER|{'|'.join(words)}") if words else (None, None)
    info = typer.Option(
        *names,
        help=field.metadata["help"],
        envvar=variable,
        rich_help_panel=group,
        parser=parser,
        metavar=shown,
    )
    taken = list[str] if field.type == tuple[str, ...] else field.type
    return _keyword(field.name, field.default, Annotated[taken, info])


def _number(words: Mapping[str, int], value: str | int) -> int:
    """Returns the number that a text is, or that a word stands for; a default is one. Raises BadParameter."""
    if isinstance(value, str) and value in words:
        return words[value]
    with contextlib.suppress(ValueError):
        if (number := int(value)) not in words.values():
            return number
    raise typer.BadParameter(f"{value!r} is neither a number of 1 and more nor {' or '.join(words)}")


def _positional() -> inspect.Parameter:
    info = typer.Argument(metavar="MODEL", help="the model, in place of --model", show_default=False)
    return _keyword(POSITIONAL, None, Annotated[str | None, info])


def _config() -> inspect.Parameter:
    info = typer.Option(
        "--config",
        envvar=ENV_PREFIX + CONFIG.upper(),
        help="YAML or TOML file of these options by their names, as `max-num-seqs: 8`; flags and variables win over it",
        rich_help_panel=USUAL,
        is_eager=True,  # before the others, whose defaults it sets
        callback=_read_config,
    )
    return _keyword(CONFIG, None, Annotated[Path | None, info])


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the options. Raises ServiceError."""
    if path is not None and not context.resilient_parsing:
        types = {**_types(ServiceConfig), **_types(EngineConfig)}
        words = {field.name: field.metadata["words"] for cls in CLASSES for field in dataclasses.fields(cls)}
        context.default_map = config_file.read(path, types, words)
    return path


def _keyword(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
