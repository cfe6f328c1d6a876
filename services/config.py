"""The service's settings, and their conversion to environment variables for child processes.

Every field is a flag `--field-name` and an environment variable `SLUICE_FIELD_NAME` (see `services.cli.options`).
Settings are frozen, and read once at the start.
"""

import dataclasses
from pathlib import Path

from sluice_server.engine.config import EngineConfig, option
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import MAX_PROMPT_BYTES
from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.sections import reasoning, tools

ENV_PREFIX = "SLUICE_"
MAX_ENGINES = 16  # of one ring, in which every process knows every other
MAX_SIZED_ENGINES = 4  # that may size their caches by themselves
GPU = Path("/dev/nvidiactl")  # exists where there is a GPU
MAX_HEDGING_DELAY_MS = 3_600_000.0
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
    models: str = option(
        "", "TOML file of models in place of --model, each in processes of its own behind the same gateways"
    )
    models_dir: str = option(
        "", "directory below which LoadModel may find models that --models does not name; empty: nowhere"
    )
    memory_budget: int = option(
        0,
        "bytes of memory that all models may take together, as planned before each is loaded; 0 is the limit of the "
        "control group, else the machine's memory",
    )
    model_wait_s: float = option(
        300.0, "seconds that requests wait for a model that sleeps or is being loaded, if their deadline is not sooner"
    )
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
    traffic_file: str = option(
        "",
        "what the files begin with in which an engine keeps what --block-size auto chooses by; set by its supervisor",
    )
    engines_file: str = option(
        "", "TOML file of the engines in place of --engine-peers, read again when it changes: engines join and leave"
    )
    detokenizer_peers: str = option("", "id=address, comma-separated, of every detokenizer")
    rank_peers: str = option("", "id=address, comma-separated, of every rank of the engine, rank 0 first")
    ring_keys: str = option("", "directory of CURVE keys, made by `sluice keys`: needed for tcp:// in the ring")
    kv_port_offset: int = option(
        0,
        "engines on tcp:// pass cache blocks to each other at the port of their inbox plus this, encrypted; 0: they do "
        "not. Needs --shared-cache-bytes",
    )
    kv_nixl: bool = option(
        False,
        "with --kv-port-offset: engines read each other's blocks by NIXL, which authenticates nobody; needs the extra "
        "`nixl` and a network of their own",
    )
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
    hedging_delay_ms: float = option(
        0.0,
        "milliseconds without a token after which another engine computes a request as well, and the faster of the two "
        "goes on; a tenth of the open requests at a time; 0 for never",
    )
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
    process_templates: bool = option(True, "fork processes from one that has imported what they need; else spawn them")
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
    log_requests: bool = option(False, "one log line, at info, for each request that ends, within 0.2 s")
    log_prompts: bool = option(False, "with its prompt, which may be private; needs --log-requests")
    audit_log: str = option("", "file that gets a line of JSON for each call of an operator; empty is off")


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


def bad_setting(name: str, message: str) -> ServiceError:
    """Returns the error for an unusable setting; it names the flag."""
    flag = "--" + name.replace("_", "-")
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", f"{flag}: {message}", field=name)


def as_text(value: object) -> str:
    """Returns a setting's value as the text of its environment variable."""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)
