"""The table of all metrics that the service exports: name, kind, unit, labels, meaning. Names are defined only here.

Names are OpenTelemetry's. Prometheus's follow from them: dots become underscores, the unit and `_total` are appended.
Every sample also carries the role and the id of its process. Standard library only.
"""

import dataclasses
import enum

# The convention's buckets, with higher ones added for slow machines.
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68)
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 120.0)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

UNITS = {"s": "_seconds", "By": "_bytes", "J": "_joules", "W": "_watts", "": ""}
LENGTHS = tuple(float(1 << i) for i in range(18))  # tokens


class MetricKind(enum.Enum):
    """The kind of a metric, as in OpenTelemetry and Prometheus."""

    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)  # there is one of each, and fields take long to hash
class Metric:
    """One metric. `unit` is one of `UNITS`, "" for plain counts; `labels` are the label names of its samples. `buckets`
    is empty for a histogram whose bounds come with its samples."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Returns the name in the exposition format; for a histogram without `_bucket`, `_sum` and `_count`."""
        name = self.name.replace(".", "_") + UNITS[self.unit]
        return name + "_total" if self.kind is MetricKind.COUNTER else name


def _counter(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels, unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels, unit)


def _histogram(name: str, text: str, buckets: tuple[float, ...] = (), *labels: str, unit: str = "s") -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, text, labels, unit, buckets)


# The gateway, as clients see it. Tokens of requests are counted only here.
REQUESTS = _counter(
    "sluice.requests",
    "Admitted requests that have ended; the reason is that of the error, or why generating ended",
    "operation",
    "code",
    "reason",
)
REFUSALS = _counter("sluice.refusals", "Requests that were refused", "reason")
TOKENS = _counter(
    "sluice.tokens", "Tokens of ended requests; cached, image, reasoning and accepted are parts of others", "kind"
)
DURATION = _histogram("gen_ai.server.request.duration", "Request duration", DURATION_S, "operation", "code")
TTFT = _histogram("gen_ai.server.time_to_first_token", "Time to first token", TTFT_S)
TPOT = _histogram("gen_ai.server.time_per_output_token", "Time per output token after the first", TPOT_S)
PREFILL_TIME = _histogram(
    "sluice.prefill.time", "From first scheduled to first token, of requests without an error", DURATION_S
)
DECODE_TIME = _histogram("sluice.decode.time", "From first token to last, of requests without an error", DURATION_S)
PROMPT_LENGTH = _histogram("sluice.request.prompt_tokens", "Prompt tokens of a request", LENGTHS, unit="")
OUTPUT_LENGTH = _histogram("sluice.request.output_tokens", "Output tokens of a request, all outputs", LENGTHS, unit="")
GAP = _histogram("sluice.inter_token_latency", "Time between two messages with tokens of one output")
EVENTS = _counter("sluice.gateway.events", "Replays, hand-offs, slow readers, dropped messages", "event", "reason")
ROUTED = _counter("sluice.routed", "Attempts by the engine that they were sent to, and why", "engine", "routing")
RESERVED = _gauge("sluice.reserved_tokens", "Tokens that open requests may use")

# Every process.
OPEN = _gauge("sluice.requests.open", "Requests with state in this process")
RING_IN = _counter("sluice.ring.in", "Frames from the ring, and those of them that were invalid", "what")
RING_OUT = _counter("sluice.ring.out", "Frames to the ring, and what happened to outgoing messages", "what")
RING = _counter("sluice.ring.events", "Messages handled and lost by this process", "what")
LAG = _histogram(
    "sluice.ring.lag",
    "From a frame's departure to its arrival in the loop, on one host",
)
MEMORY = _gauge("sluice.memory", "Memory of this process by what it holds", "kind", unit="By")
GROUP_MEMORY = _gauge(
    "sluice.memory.group",
    "Memory of the control group, or of the machine where no group has a limit",
    "what",
    unit="By",
)
MEMORY_LEVEL = _gauge("sluice.memory.level", "How short memory is: 0 enough, 1 WARN, 2 CRITICAL")
MEMORY_LEFT = _gauge(
    "sluice.memory.exhaustion", "Until memory is used up at the present rate, an hour at most", unit="s"
)
MEMORY_STALLED = _gauge(
    "sluice.memory.stalled_ratio", "Share of the last ten seconds in which a process of the machine waited for memory"
)
OOM_KILLS = _gauge("sluice.memory.oom_kills", "Processes of the control group that the kernel has killed for memory")
PROFILES = _counter("sluice.profiles", "Profiles of this process by how they ended", "kind", "end")
SPANS = _counter("sluice.spans", "Spans by outcome", "outcome")

# The engine: its queue and its steps.
WAITING = _gauge("sluice.requests.waiting", "Sequences that wait for a slot")
RUNNING = _gauge("sluice.requests.running", "Sequences with a slot")
QUEUE_DEPTH = _gauge("sluice.queue.depth", "Sequences that wait for a slot, by tenant", "policy", "tenant")
QUEUE_TIME = _histogram("sluice.queue.time", "From arrival to first scheduled", TTFT_S, "policy", "tenant")
ENGINE_ENDS = _counter("sluice.engine.requests", "Requests by their end in the engine", "end")
ENGINE_ERRORS = _counter("sluice.engine.errors", "Requests that failed in the engine", "reason")
STEPS = _counter("sluice.engine.steps", "Steps")
STEP_TIME = _histogram(
    "sluice.engine.step.time",
    "Time of a step",
)
STEP_SPLIT = _counter("sluice.engine.step.part", "Time of steps by activity", "part", unit="s")
STEP_SIZE = _histogram("sluice.engine.step.tokens", "Tokens computed in a step", unit="")
COMPUTED = _counter("sluice.engine.tokens_computed", "Tokens computed, prompt and output")
RANK_TIME = _counter(
    "sluice.rank",
    "Time of a rank's steps: all of it, and what it spends in sums with other ranks",
    "rank",
    "part",
    unit="s",
)
RANK_SKEW = _counter("sluice.rank.skew", "Time between the fastest and the slowest rank of a step", unit="s")
AWAITING_GRAMMAR = _gauge("sluice.grammar.waiting", "Requests whose grammar is being compiled")
WITH_GRAMMAR = _gauge("sluice.grammar.open", "Open requests with a grammar")

# Images: their pixels in the tokenizer, what the vision tower computes of them in the engine.
IMAGES = _counter(
    "sluice.images",
    "Images by what happened: prepared, kept (pixels found), refused; encoded, found (rows found)",
    "what",
)
IMAGE_TIME = _counter(
    "sluice.image", "Time spent on images: prepare in the tokenizer, encode in the engine", "part", unit="s"
)

# Its cache, preemption and speculation.
BLOCKS = _gauge(
    "sluice.cache.blocks", "Cache blocks on the device by state, and those in use on lower tiers", "tier", "state"
)
CACHE_LEFT = _gauge(
    "sluice.cache.exhaustion", "Until all cache blocks are held at the present rate, an hour at most", unit="s"
)
CACHE_WASTE = _gauge("sluice.cache.waste_ratio", "Share of the cache blocks in use that holds no token")
PREFIX_QUERIES = _counter("sluice.prefix.query_tokens", "Tokens looked up in the prefix cache")
PREFIX_HITS = _counter("sluice.prefix.hit_tokens", "Tokens found there")
EVICTIONS = _counter("sluice.cache.evictions", "Cached blocks that were overwritten")
MOVES = _counter("sluice.cache.moves", "Blocks moved between tiers, and between engines", "what")
PREEMPTIONS = _counter("sluice.preemptions", "Preempted sequences by what happens to their blocks", "way")
RECOMPUTED = _counter("sluice.recomputed_tokens", "Tokens computed once more after a preemption")
DRAFTED = _counter("sluice.drafted_tokens", "Drafted tokens by their position in the draft", "place")
ACCEPTED = _counter("sluice.accepted_tokens", "Drafted tokens that were accepted, by their position", "place")

# Its weights that do not stay in memory: with the rate of steps, the bytes that they read in a second.
OFFLOADED = _gauge(
    "sluice.weights.offloaded",
    "Bytes of weights that each step reads from a file, or from the host",
    "where",
    unit="By",
)
OFFLOAD_WAIT = _counter("sluice.weights.wait", "Time for which steps waited for weights from a file", unit="s")

# The GPUs that it computes on, with what other processes do there. Their names are those of `nvidia-smi -L`.
GPU_MEMORY = _gauge("sluice.gpu.memory", "Memory of a GPU: used, limit", "gpu", "what", unit="By")
GPU_BUSY = _gauge("sluice.gpu.busy_ratio", "Share of the last moments in which a kernel ran on a GPU", "gpu")
GPU_POWER = _gauge("sluice.gpu.power", "Power that a GPU takes", "gpu", unit="W")
GPU_ENERGY = _counter("sluice.gpu.energy", "Energy that a GPU took since its driver was loaded", "gpu", unit="J")

# Its adapters.
ADAPTERS = _gauge(
    "sluice.adapters", "Adapters by where they are: in a slot for steps, in host memory, or known", "where"
)
ADAPTER_BYTES = _gauge("sluice.adapters.bytes", "Bytes of the adapters in slots, and in host memory", "where")
ADAPTER_LOADS = _counter("sluice.adapter.loads", "Adapters read, loaded into slots, evicted, and lost", "what")
ADAPTER_READ_TIME = _counter("sluice.adapter.read", "Time of reading adapters", unit="s")
ADAPTER_WAIT = _histogram("sluice.adapter.wait", "Time that requests waited for their adapter, of those that did")

# The HTTP edge. Names are those of OpenTelemetry's HTTP conventions.
HTTP_DURATION = _histogram(
    "http.server.request.duration",
    "From an HTTP request's head to the end of its answer; status 499 where the client left first",
    DURATION_S,
    "route",
    "method",
    "status",
)
HTTP_ACTIVE = _gauge("http.server.active_requests", "HTTP requests that are being answered")

# The detokenizer.
LATE_TOKENS = _counter("sluice.late_tokens", "Tokens sampled after their output's end")

ALL: tuple[Metric, ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
