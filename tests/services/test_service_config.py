"""Settings: each bad value names its flag; child processes get the same settings through their environment."""

import dataclasses

import pytest

from sluice_server.engine.config import AUTO, EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.checks.processes import check_threads
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig, parse_peers, to_environment
from sluice_server.services.messages.processes import Role

BAD: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"block_size": 0}, {}, "--block-size: 0 is below 1"),
    (
        {"block_size": AUTO["auto"]},
        {},
        "--block-size: auto is for `sluice serve` of one model.*: give a number, as 32",
    ),
    ({"block_size": -1}, {}, "--block-size: -1 is below 1"),
    ({"threads": -1}, {}, "--threads: -1 is below 0"),
    ({"threads": 100_000}, {}, r"--threads: 100000 is above \d+, 4 for each core that can be used here \("),
    ({}, {"encoding_threads": 100_000}, "--encoding-threads: 100000 is above"),
    ({}, {"gateways": 100_000}, "--gateways: 100000 is above"),
    ({}, {"engines": 0}, r"--engines: 0 is not in \[1, 16\]; more need a service of their own"),
    ({}, {"engines": 17}, r"--engines: 17 is not in \[1, 16\]"),
    ({"device": "cuda"}, {"engines": 2}, "--engines: 2 would share one GPU; start each with --role engine"),
    ({}, {"engines": 5}, "--engines: 5 is above 4, each of which takes a quarter of the free memory, needs --kv-"),
    (
        {},
        {"engine_role": "both", "prefill_engines": 1},
        r"--prefill-engines: 1 is not in \[0, 0\]: one of --engines must",
    ),
    ({}, {"engines": 2, "prefill_engines": -1}, r"--prefill-engines: -1 is not in \[0, 1\]"),
    ({}, {"engines": 2, "prefill_engines": 1}, "--prefill-engines: needs --routing kv-cost"),
    (
        {"kv_events": True},
        {"engines": 2, "prefill_engines": 1, "routing": "kv-cost"},
        "--prefill-engines: needs --shared-cache-bytes",
    ),
    ({}, {"engine_role": "decode"}, "--engine-role: is for --role engine; --prefill-engines divides"),
    ({}, {"role": "engine", "engine_role": "decode"}, "--engine-role: needs --routing kv-cost"),
    ({}, {"engine_role": "train"}, "--engine-role: 'train' is not one of both, prefill, decode"),
    ({}, {"routing": "random"}, "--routing: 'random' is not one of least-loaded, round-robin"),
    ({"device": "tpu"}, {}, "--device: 'tpu' is not one of auto, cpu, cuda"),
    (
        {"scheduling_policy": "lottery"},
        {},
        "--scheduling-policy: 'lottery' is not one of priority, fcfs,",
    ),
    ({"tenant_weights": "a=0"}, {}, "--tenant-weights: 'a=0' is not tenant=weight with a weight above 0"),
    ({"tenant_weights": "a=1,a=2"}, {}, "--tenant-weights: the tenant 'a' is given twice"),
    ({"pause_hold_s": -1.0}, {}, "--pause-hold-s: -1.0 is not a number of seconds"),
    ({"admission_watermark": 0.95}, {}, "--admission-watermark: 0.95 is not in"),
    ({"max_queued_tokens": 0}, {}, "--max-queued-tokens: 0 is below 1"),
    ({"speculation": "oracle"}, {}, "--speculation: 'oracle' is not one of none, ngram"),
    ({"speculation": "draft"}, {}, "--draft-model: names no checkpoint, and --speculation draft drafts with one"),
    ({"draft_model": "demo"}, {}, "--draft-model: is used with --speculation draft or eagle only"),
    ({"max_adapters": 2}, {}, "--max-adapters: is 2: say where they are, by --adapter-dir or --adapter-hub"),
    ({"adapter_hub": "org/*"}, {}, "--max-adapters: is 0, which takes none: say how many may run at once"),
    ({"max_adapters": 2, "adapter_hub": "org/*,*"}, {}, r"--adapter-hub: '\*' is no ORG/NAME and no ORG/\*"),
    ({"max_adapters": 2, "adapter_dir": "/nowhere"}, {}, "--adapter-dir: there is no directory '/nowhere'"),
    ({"draft_length": "long"}, {}, "--draft-length: 'long' is not one of adaptive, fixed"),
    ({"max_draft_tokens": 65}, {}, "--max-draft-tokens: 65 is not in"),
    ({"max_draft_width": 9}, {}, r"--max-draft-width: 9 is not in \[1, 8\]"),
    ({"max_draft_width": 2, "speculation": "ngram"}, {}, "--max-draft-width: above 1 needs --speculation draft or"),
    ({"gpu_memory_utilization": 1.5}, {}, "--gpu-memory-utilization: 1.5 is not in"),
    ({"kv_cache_tokens": 100, "block_size": 32}, {}, "--block-size: 32 does not divide --kv-cache-tokens 100"),
    ({"max_num_pooling_tokens": -1}, {}, "--max-num-pooling-tokens: -1 is below 0"),
    ({"weights_offload_bytes": -1}, {}, "--weights-offload-bytes: -1 is below 0"),
    ({"disk_cache_bytes": 1}, {}, "--disk-cache-dir: needs --disk-cache-bytes, and neither"),
    ({"disk_cache_dir": "/x", "disk_cache_bytes": 1}, {}, "--disk-cache-dir: needs --host-cache-bytes"),
    (
        {"disk_cache_dir": "/proc/nowhere", "disk_cache_bytes": 1, "host_cache_bytes": 1},
        {},
        "--disk-cache-dir: cannot write to /proc/nowhere",
    ),
    ({"tensor_parallel_size": 0}, {}, "--tensor-parallel-size: 0 is below 1"),
    ({"pipeline_parallel_size": 0}, {}, "--pipeline-parallel-size: 0 is below 1"),
    (
        {"pipeline_parallel_size": 2, "device": "cuda"},
        {},
        "--pipeline-parallel-size: 2 is not supported over several GPUs",
    ),
    (
        {"pipeline_parallel_size": 2, "expert_parallel": True},
        {},
        "--expert-parallel: shares out experts among tensor-parallel ranks, and there is one",
    ),
    ({"expert_parallel": True}, {}, "--expert-parallel: .* needs --tensor-parallel-size above 1, or leave it out"),
    ({"tensor_parallel_size": 2, "sum_shards": 3}, {}, "--sum-shards: 3 is no multiple of --tensor-parallel-size 2"),
    ({}, {"kv_port_offset": 100}, "--kv-port-offset: needs --shared-cache-bytes"),
    ({"shared_cache_bytes": 1 << 20}, {"kv_nixl": True}, "--kv-nixl: needs --kv-port-offset"),
    ({"shared_cache_bytes": 1 << 20}, {"kv_port_offset": -1}, r"--kv-port-offset: -1 is not in \[0, 65534\]"),
    (
        {"shared_cache_bytes": 1 << 20},
        {"kv_port_offset": 60_000, "role": "engine", "inbox": "tcp://10.0.0.1:7000"},
        "--kv-port-offset: 60000 and the port of --inbox, 7000, are above 65535",
    ),
    ({}, {"gateways": 0}, "--gateways: 0 is below 1"),
    ({}, {"grace_s": float("nan")}, "--grace-s: nan is not a number of seconds"),
    ({}, {"text_interval_ms": -1.0}, r"--text-interval-ms: -1 is not in \[0, 1000\]"),
    ({}, {"text_interval_ms": float("nan")}, r"--text-interval-ms: nan is not in"),
    ({}, {"metrics_port": 70000}, "--metrics-port: 70000 is not in"),
    ({}, {"audit_log": "/nowhere/audit.jsonl"}, "--audit-log: cannot write to /nowhere/audit.jsonl"),
    ({}, {"audit_log": "/proc"}, "--audit-log: cannot write to /proc"),
    ({}, {"log_format": "xml"}, "--log-format: 'xml' is not one of console, json"),
]


@pytest.mark.parametrize(("engine", "service", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_settings_name_their_flag(engine: dict[str, object], service: dict[str, object], message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        check(EngineConfig(**engine), ServiceConfig(**service))  # type: ignore[arg-type] # bad on purpose


def test_threads_are_limited_where_they_are_used() -> None:
    engine, service = EngineConfig(threads=100_000), ServiceConfig(encoding_threads=100_000, gateways=100_000)
    for role, flag in ((Role.ENGINE, "--threads"), (Role.TOKENIZER, "--encoding-threads"), ("", "--threads")):
        with pytest.raises(ServiceError, match=f"^{flag}: 100000 is above"):
            check_threads(engine, dataclasses.replace(service, role=role))
    check_threads(engine, dataclasses.replace(service, role=Role.GATEWAY))


def test_defaults_are_good() -> None:
    check(EngineConfig(), ServiceConfig())
    assert {field.name for field in dataclasses.fields(EngineConfig)}.isdisjoint(
        field.name for field in dataclasses.fields(ServiceConfig)
    )


def test_environment_carries_every_setting() -> None:
    environment = to_environment(EngineConfig(prefix_caching=False), ServiceConfig(role="engine"))
    assert environment["SLUICE_PREFIX_CACHING"] == "0"
    assert environment["SLUICE_ROLE"] == "engine"
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServiceConfig))
    assert set(environment) == {f"SLUICE_{field.name.upper()}" for field in fields} | {"SLUICE_CONFIG"}
    assert environment["SLUICE_CONFIG"] == "", "a child does not read the file again"


def test_peer_tables() -> None:
    assert parse_peers(Role.ENGINE, "e0=ipc:///x, e1=tcp://h:1,") == {"e0": "ipc:///x", "e1": "tcp://h:1"}
    for text in ("e0", "e0=http://h", "=ipc:///x", "e0=ipc:///x,e0=ipc:///y"):
        with pytest.raises(ServiceError, match="--engine-peers"):
            parse_peers(Role.ENGINE, text)
