"""The service's settings, and their conversion to environment variables for child processes.

Every field is a flag `--field-name` and an environment variable `SLUICE_FIELD_NAME` (see `services.cli.options`).
Settings are frozen, and read once at the start.
"""

import dataclasses
import math
from pathlib import Path

from sluice_server.engine.config import CACHE_DTYPES, QUANTIZATIONS, EngineConfig, option
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.disk import check_directory
from sluice_server.engine.parallel.options import check_parallel
from sluice_server.engine.request import MAX_DRAFT_TOKENS, MAX_DRAFT_WIDTH, MAX_PROMPT_BYTES
from sluice_server.engine.scheduler.policies import POLICIES
from sluice_server.engine.scheduler.settings import parse_weights
from sluice_server.engine.worker.host.cores import THREADS_A_CORE, find_cores
from sluice_server.services.media.urls import hosts_of
from sluice_server.services.messages.processes import EngineRole, Role
from sluice_server.services.sections import reasoning, tools

ENV_PREFIX = "SLUICE_"
MAX_ENGINES = 16  # of one ring, in which every process knows every other
MAX_SIZED_ENGINES = 4  # that may size their caches by themselves
GPU = Path("/dev/nvidiactl")  # exists where there is a GPU
KV_COST = "kv-cost"  # the tokenizer's choice, by what caches hold; see `services.routing`
ROUTING = ("least-loaded", "round-robin", KV_COST)
MAX_TEXT_INTERVAL_MS = 1000.0
WORKER = "worker"  # the role of a process that is a rank other than 0; it is outside of the ring


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of a service: addresses of its processes, access, limits, restarts and telemetry."""

    model: str = option(
        "demo",
        "smollm2, a checkpoint directory, a GGUF file, a hub id (org/name, or org/name:Q4_K_M for a GGUF file), or "
        "demo, the embedded model",
    )
    revision: str = option("", "branch, tag or commit of a hub model; of a directory a label before its content's name")
    served_model_name: str = option("", "model name in requests; default: as in --model")
    listen: str = option("127.0.0.1:50051", "host:port of the gRPC server, or unix:/path; port 0 takes a free one")
    http: str = option("", "host:port of an HTTP server with OpenAI's API beside the gRPC server; empty is off")
    tls_cert: str = option("", "PEM certificate chain of the gRPC and HTTP servers; read again when it changes")
    tls_key: str = option("", "PEM key of --tls-cert")
    tls_client_ca: str = option("", "PEM authorities of clients' certificates; clients must then show one (mTLS)")
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send; may be repeated; all are one tenant. Others of this host can read a command line: "
        "better the variable (keys separated by spaces), --config, or sha256:HEX in place of a key",
    )
    access_file: str = option("", "TOML file of tenants, hashed keys and quotas; read again when it changes")
    insecure: bool = option(False, "serve an address that other hosts reach in plaintext")
    vllm_listen: str = option(
        "", "address for a Shepherd Model Gateway, which brings no key: loopback, unix:/path, any with --tls-client-ca"
    )
    vllm_tenant: str = option("default", "tenant of all callers of --vllm-listen without a certificate of their own")
    reflection: bool = option(True, "serve the contract by gRPC reflection")
    allowed_origins: str = option("", "web origins whose pages may call HTTP, comma-separated, https://host; * is all")
    allowed_hosts: str = option(
        "",
        "names in the Host header of HTTP beside localhost and addresses, comma-separated; *.name, or * for all, which "
        "is the default where other hosts reach the server",
    )
    root_path: str = option("", "path below which a proxy serves HTTP, as /llm")
    access_log: bool = option(False, "one log line, at info, for each HTTP request")
    role: str = option("", "run one process alone: gateway, tokenizer, engine, detokenizer or worker")
    process_id: str = option("", "this process's name in the peer tables; default: <role>-0")
    inbox: str = option("", "where this process listens for ring messages: tcp://host:port or ipc://path")
    gateway_peers: str = option("", "id=address, comma-separated, of every gateway")
    tokenizer_peers: str = option("", "id=address, comma-separated, of every tokenizer")
    engine_peers: str = option("", "id=address, comma-separated, of every engine")
    engines_file: str = option(
        "", "TOML file of the engines in place of --engine-peers, read again when it changes: engines join and leave"
    )
    detokenizer_peers: str = option("", "id=address, comma-separated, of every detokenizer")
    rank_peers: str = option("", "id=address, comma-separated, of every rank of the engine, rank 0 first")
    ring_keys: str = option("", "directory of CURVE keys, made by `sluice keys`: needed for tcp:// in the ring")
    gateways: int = option(1, "gateway processes, sharing the port")
    tokenizers: int = option(1, "tokenizer processes")
    engines: int = option(
        1, "engine processes, each with weights and cache; others take over the requests of a lost one"
    )
    prefill_engines: int = option(
        0, "of --engines, how many compute prompts only; the others go on behind the first token. Needs kv-cost routing"
    )
    engine_role: str = option(
        EngineRole.BOTH.value,
        f"with --role engine, what it gets: {', '.join(EngineRole)}. The last two need kv-cost routing",
    )
    routing: str = option(ROUTING[0], f"how a request's engine is chosen: {', '.join(ROUTING)} (what caches hold)")
    detokenizers: int = option(1, "detokenizer processes")
    peer_secret: str = option("", "secret with which gateways of one host pass on calls; made anew at each start")
    allow_shared_cores: bool = option(False, "ranks may be more than cores, and then take turns")
    encoding_threads: int = option(1, "threads of a tokenizer process that encode prompts")
    max_open_requests: int = option(256, "requests admitted at once; more are refused with RESOURCE_EXHAUSTED")
    max_prompt_bytes: int = option(MAX_PROMPT_BYTES, "the most bytes of a prompt")
    text_interval_ms: float = option(
        40.0, "the most milliseconds between two texts of an output while many streams run; 0 sends text at each step"
    )
    chat_template: str = option("", "file of a Jinja template, or its text, in place of the checkpoint's own")
    tool_call_parser: str = option(tools.AUTO, f"how the model writes tool calls: {', '.join(tools.NAMES)}")
    reasoning_parser: str = option(tools.AUTO, f"how the model marks reasoning: {', '.join(reasoning.NAMES)}")
    media_workers: int = option(1, "processes of a tokenizer that decode images, where the model takes any")
    media_from: str = option(
        "",
        "hosts, comma-separated, from which images are fetched over https by the URLs of requests; empty fetches none",
    )
    image_store_bytes: int = option(
        64 << 20,
        "bytes of images that a gateway keeps, so that clients can name them by digest instead of sending them",
    )
    max_open_image_bytes: int = option(
        256 << 20, "bytes of images that open requests hold at a gateway; more are refused with RESOURCE_EXHAUSTED"
    )
    trust_chat_content: bool = option(False, "content of chats may write control tokens, such as <|im_end|>")
    trust_request_chat_template: bool = option(False, "a request may bring its own chat template")
    probe_interval_s: float = option(0.25, "seconds between health probes round the ring")
    probe_timeout_s: float = option(5.0, "seconds without a probe's return after which the ring counts as stuck")
    max_connection_age_s: float = option(1800.0, "seconds after which clients must reconnect, so that load spreads")
    recovery_timeout_s: float = option(60.0, "seconds that open requests wait for a lost process to come back")
    memory_watch: bool = option(False, "watch the memory of the control group, and use less before it runs out")
    memory_warn_share: float = option(
        0.1, "share of the memory limit, of 4 GiB at most, below which memory counts as short; 0.01 to 0.9"
    )
    grace_s: float = option(30.0, "seconds that running generations get to finish after SIGTERM")
    heartbeat_dir: str = option("", "directory of the heartbeat files, for `sluice healthcheck`; empty is off")
    max_restarts: int = option(
        8, "the most restarts of one process in a minute, or until all serve again; one more ends the service"
    )
    metrics_port: int = option(0, "first port of the Prometheus endpoints, one for each process; 0 is off")
    metrics_host: str = option("127.0.0.1", "host on which the Prometheus endpoints listen; they require no key")
    otlp_endpoint: str = option("", "OTLP/gRPC collector for traces and metrics, http://host:port; empty is off")
    trace_sample_ratio: float = option(1.0, "share of requests traced if the caller does not decide; 0 to 1")
    trace_slow_s: float = option(10.0, "seconds after which a request counts as slow and its spans are always kept")
    log_level: str = option("info", "debug, info, warning or error")
    log_format: str = option("console", "console or json")
    log_requests: bool = option(False, "one log line, at info, for each request that ends")
    log_prompts: bool = option(False, "with its prompt, which may be private; needs --log-requests")


DEFAULTS = ServiceConfig()  # the single source of defaults; other modules take theirs from here


def to_environment(engine: EngineConfig, service: ServiceConfig) -> dict[str, str]:
    """Returns the settings as environment variables, by which a supervisor passes them to its children."""
    fields = {**dataclasses.asdict(engine), **dataclasses.asdict(service)}
    made = {ENV_PREFIX + name.upper(): as_text(value) for name, value in fields.items()}
    return {**made, f"{ENV_PREFIX}CONFIG": ""}  # its values are among these; a child must not read it again


def parse_peers(role: str, text: str) -> dict[str, str]:
    """Returns the peer table {id: address} of "id=address,…". Raises ServiceError naming the flag if it is
    malformed."""
    table: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, address = entry.partition("=")
        if not name or not address.startswith(("tcp://", "ipc://")):
            raise bad_setting(f"{role}_peers", f"{entry!r} is not id=tcp://host:port or id=ipc://path")
        if name in table:
            raise bad_setting(f"{role}_peers", f"the id {name!r} is given twice")
        table[name] = address
    return table


def check(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError naming the first setting that is out of range. Called before any process starts."""
    for name in (
        *("gateways", "tokenizers", "detokenizers", "encoding_threads", "max_open_requests", "max_prompt_bytes"),
        *("media_workers", "max_open_image_bytes"),
    ):
        _at_least(name, getattr(service, name), 1)
    _at_least("image_store_bytes", service.image_store_bytes, 0)
    _check_media_from(service.media_from)
    _check_engines(engine, service)
    check_threads(engine, service)
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_queued_requests", "max_queued_tokens"):
        _at_least(name, getattr(engine, name), 1)
    _at_least("max_restarts", service.max_restarts, 0)
    if not 0.0 <= service.text_interval_ms <= MAX_TEXT_INTERVAL_MS:
        raise bad_setting("text_interval_ms", f"{service.text_interval_ms:g} is not in [0, {MAX_TEXT_INTERVAL_MS:g}]")
    for name in (
        "max_model_len",
        "kv_cache_tokens",
        "kv_cache_max_tokens",
        "kv_cache_min_tokens",
        "threads",
        "host_cache_bytes",
        "disk_cache_bytes",
        "shared_cache_bytes",
        "max_num_pooling_tokens",
        "encoder_cache_bytes",
        "max_adapters",
        "adapter_bytes",
        "adapter_host_bytes",
    ):
        _at_least(name, getattr(engine, name), 0)
    for name in ("probe_interval_s", "probe_timeout_s", "recovery_timeout_s", "grace_s", "max_connection_age_s"):
        _seconds(name, getattr(service, name))
    for name in ("priority_ageing_s", "starvation_bound_s", "pause_hold_s", "disk_cache_save_s", "adapter_turn_s"):
        _seconds(name, getattr(engine, name))
    if not -10.0 <= engine.admission_watermark <= 0.9:
        raise bad_setting("admission_watermark", f"{engine.admission_watermark} is not in [-10, 0.9]")
    if not 0.01 <= engine.encoder_share <= 10.0:
        raise bad_setting("encoder_share", f"{engine.encoder_share} is not in [0.01, 10]")
    _one_of("scheduling_policy", engine.scheduling_policy, tuple(POLICIES))
    parse_weights(engine.tenant_weights)
    if engine.kv_cache_tokens % engine.block_size:
        text = f"{engine.block_size} does not divide --kv-cache-tokens {engine.kv_cache_tokens}"
        raise bad_setting("block_size", text)
    _check_resizing(engine)
    _check_adapters(engine)
    _check_disk_cache(engine)
    _check_shared_cache(engine)
    _check_speculation(engine)
    _check_gpu_memory(engine)
    check_parallel(engine)
    _one_of("device", engine.device, ("auto", "cpu", "cuda"))
    _one_of("dtype", engine.dtype, ("auto", "float32", "bfloat16"))
    _one_of("quantization", engine.quantization, QUANTIZATIONS)
    _one_of("kv_cache_dtype", engine.kv_cache_dtype, ("auto", *CACHE_DTYPES))
    _one_of("role", service.role, ("", *Role, WORKER))
    check_keys(service)
    _one_of("tool_call_parser", service.tool_call_parser, tools.NAMES)
    _one_of("reasoning_parser", service.reasoning_parser, reasoning.NAMES)
    _check_telemetry(service)


def _check_resizing(engine: EngineConfig) -> None:
    start, most, least = engine.kv_cache_tokens, engine.kv_cache_max_tokens, engine.kv_cache_min_tokens
    if most and start > most:
        raise bad_setting("kv_cache_max_tokens", f"{most} is below --kv-cache-tokens {start}")
    if least and start and least > start:
        raise bad_setting("kv_cache_min_tokens", f"{least} is above --kv-cache-tokens {start}")
    if most and engine.num_ranks > 1:
        raise bad_setting("kv_cache_max_tokens", "the cache of several ranks has a fixed size: leave it out")


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
    _one_of("log_level", service.log_level, ("debug", "info", "warning", "error"))
    if service.log_prompts and not service.log_requests:
        raise bad_setting("log_prompts", "needs --log-requests: prompts are part of its lines")
    _seconds("trace_slow_s", service.trace_slow_s)
    if not 0.0 <= service.trace_sample_ratio <= 1.0:
        raise bad_setting("trace_sample_ratio", f"{service.trace_sample_ratio} is not in [0, 1]")
    if not 0.01 <= service.memory_warn_share <= 0.9:
        raise bad_setting("memory_warn_share", f"{service.memory_warn_share} is not in [0.01, 0.9]")
    _one_of("log_format", service.log_format, ("console", "json"))
    if not 0 <= service.metrics_port <= 65000:
        raise bad_setting("metrics_port", f"{service.metrics_port} is not in [0, 65000]")


def check_threads(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for more threads, or processes of a role, than this machine can use. With `role` set, only
    that role's settings are checked: other roles may run on other machines or under other quotas."""
    wanted: dict[str, int] = {}
    if service.role in ("", Role.ENGINE):
        wanted["threads"] = engine.threads
    if service.role in ("", Role.TOKENIZER):
        wanted |= {"encoding_threads": service.encoding_threads, "media_workers": service.media_workers}
    if not service.role:
        wanted |= {name: getattr(service, name) for name in ("gateways", "tokenizers", "engines", "detokenizers")}
    cores = find_cores()
    for name, value in wanted.items():
        if value > cores.max_threads:
            limit = f"{cores.max_threads}, {THREADS_A_CORE} for each core that can be used here ({cores})"
            raise bad_setting(name, f"{value} is above {limit}; leave it out, or give a number of cores")


def _check_engines(engine: EngineConfig, service: ServiceConfig) -> None:
    _one_of("routing", service.routing, ROUTING)
    if service.routing == KV_COST and not engine.prefix_caching:
        raise bad_setting("routing", f"{KV_COST} chooses by prefix caches, and --no-prefix-caching has none")
    if service.routing == KV_COST and service.role and not engine.kv_events:
        raise bad_setting("routing", f"{KV_COST} needs --kv-events at every process")
    check_roles(engine, service)
    num = service.engines
    if not 1 <= num <= MAX_ENGINES:
        raise bad_setting("engines", f"{num} is not in [1, {MAX_ENGINES}]; more need a service of their own")
    if num == 1:
        return
    if engine.device == "cuda" or (engine.device == "auto" and GPU.exists()):
        text = f"{num} would share one GPU; start each with --role engine and a CUDA_VISIBLE_DEVICES of its own, or add"
        raise bad_setting("engines", f"{text} --device cpu")
    if num > MAX_SIZED_ENGINES and not engine.kv_cache_tokens:
        text = f"above {MAX_SIZED_ENGINES}, each of which takes a quarter of the free memory, needs --kv-cache-tokens"
        raise bad_setting("engines", f"{num} is {text}")


def check_roles(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for engines that are apart for prompts where none can hand them off."""
    _one_of("engine_role", service.engine_role, tuple(EngineRole))
    if not 0 <= service.prefill_engines < max(service.engines, 1):
        text = (
            f"{service.prefill_engines} is not in [0, {service.engines - 1}]: one of --engines must go on behind them"
        )
        raise bad_setting("prefill_engines", text)
    name = "prefill_engines" if service.prefill_engines else "engine_role"
    if service.engine_role != EngineRole.BOTH and not service.role:
        raise bad_setting("engine_role", "is for --role engine; --prefill-engines divides those of a whole service")
    if not service.prefill_engines and service.engine_role == EngineRole.BOTH:
        return
    if service.routing != KV_COST:
        raise bad_setting(name, f"needs --routing {KV_COST}: the router decides which prompts are computed apart")
    if not engine.shared_cache_bytes:
        raise bad_setting(name, "needs --shared-cache-bytes: other engines fetch the blocks of a prompt from there")


def _check_gpu_memory(engine: EngineConfig) -> None:
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise bad_setting("gpu_memory_utilization", f"{engine.gpu_memory_utilization} is not in (0, 1]")


def _check_speculation(engine: EngineConfig) -> None:
    _one_of("draft_length", engine.draft_length, ("adaptive", "fixed"))
    _one_of("speculation", engine.speculation, ("none", "ngram", "grammar", "draft", "eagle"))
    if not 1 <= engine.max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise bad_setting("max_draft_tokens", f"{engine.max_draft_tokens} is not in [1, {MAX_DRAFT_TOKENS}]")
    if not 1 <= engine.max_draft_width <= MAX_DRAFT_WIDTH:
        raise bad_setting("max_draft_width", f"{engine.max_draft_width} is not in [1, {MAX_DRAFT_WIDTH}]")
    if engine.max_draft_width > 1 and engine.speculation not in ("draft", "eagle"):
        raise bad_setting("max_draft_width", "above 1 needs --speculation draft or eagle: nothing else branches")
    if bool(engine.draft_model) != (engine.speculation in ("draft", "eagle")):
        raise bad_setting("draft_model", "and --speculation draft or eagle need each other")


def _check_shared_cache(engine: EngineConfig) -> None:
    if engine.shared_cache_bytes and not engine.prefix_caching:
        raise bad_setting("shared_cache_bytes", "is for blocks of the prefix cache, and --no-prefix-caching has none")
    if engine.shared_cache_bytes and engine.device == "cuda":
        raise bad_setting("shared_cache_bytes", "is not supported with --device cuda yet: leave one of the two out")


def _check_adapters(engine: EngineConfig) -> None:
    if bool(engine.adapter_dir) != bool(engine.max_adapters):
        raise bad_setting("adapter_dir", "and --max-adapters need each other")
    if engine.adapter_dir and not Path(engine.adapter_dir).is_dir():
        raise bad_setting("adapter_dir", f"there is no directory {engine.adapter_dir!r}: make it, or name another")
    if engine.max_adapters and engine.num_ranks > 1:
        raise bad_setting("max_adapters", "adapters are not supported by a model over several ranks: use one")


def _check_disk_cache(engine: EngineConfig) -> None:
    if bool(engine.disk_cache_dir) != bool(engine.disk_cache_bytes):
        raise bad_setting("disk_cache_dir", "needs --disk-cache-bytes, and neither is used without the other")
    if not engine.disk_cache_dir:
        return
    if not engine.host_cache_bytes:
        raise bad_setting("disk_cache_dir", "needs --host-cache-bytes: blocks pass through host memory")
    try:
        check_directory(Path(engine.disk_cache_dir))
    except OSError as error:
        text = f"cannot write to {engine.disk_cache_dir} ({error.strerror}); choose a directory that can be written to"
        raise bad_setting("disk_cache_dir", text) from error


def bad_setting(name: str, message: str) -> ServiceError:
    """Returns the error for an unusable setting; it names the flag."""
    flag = "--" + name.replace("_", "-")
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", f"{flag}: {message}", field=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise bad_setting(name, f"{value} is below {low}")


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise bad_setting(name, f"{value} is not a number of seconds")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise bad_setting(name, f"{value!r} is not one of {', '.join(filter(None, allowed))}")


def as_text(value: object) -> str:
    """Returns a setting's value as the text of its environment variable."""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)
