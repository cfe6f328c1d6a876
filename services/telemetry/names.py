"""The names of all spans, span events and attributes that the service exports.

They follow OpenTelemetry's GenAI conventions (development status) and RPC conventions (release candidate), as of the
schema below.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SERVICE_NAME = "sluice"

SPAN_ADMISSION = "admission"  # of a request that was refused at admission
SPAN_TOKENIZE = "tokenize"
SPAN_IMAGES = "images"  # inside of tokenize, while their pixels are prepared
SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_DECODE = "decode"
SPAN_DETOKENIZE = "detokenize"
SPAN_STEP = "step"  # a root span, linked to the requests of the step; made for some steps only

EVENT_CHUNK = "sluice.chunk"
EVENT_PREEMPTED = "sluice.preempted"
EVENT_RESUMED = "sluice.resumed"
EVENT_STEP = "sluice.step"  # an event of decode, for a step that has a span
EVENT_RANK = "sluice.rank"  # an event of a step's span, for each rank of a group
EVENT_REPLAYED = "sluice.replayed"  # sent through the ring again, as a process was lost
EVENT_HEDGE_WON = "sluice.hedge_won"  # goes on at a second engine, which brought a token sooner
EVENT_HANDED_OFF = "sluice.handed_off"  # goes on at another engine than the one that computed the prompt
EVENT_REATTACHED = "sluice.reattached"  # another call reads the generation from now on

RPC_SERVICE = "sluice.v1.InferenceService"

OPERATION_CHAT = "chat"
OPERATION_COMPLETION = "text_completion"

RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
ERROR_TYPE = "error.type"

# Statuses that are errors of the server; a server span with any other status is not an error.
RPC_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICES = "gen_ai.request.choice.count"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TTFT = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_REASONING = "gen_ai.usage.reasoning.output_tokens"
GEN_AI_USAGE_CACHED = "gen_ai.usage.cache_read.input_tokens"

# Attributes that no convention has yet.
REQUEST_ID = "sluice.request_id"
ATTEMPT = "sluice.attempt"
TENANT = "sluice.tenant"
ROLE = "sluice.role"
OUTPUT = "sluice.output"
CANCELLED = "sluice.cancelled"
NUM_TOKENS = "sluice.tokens"
NUM_PROMPT = "sluice.prompt_tokens"
NUM_CACHED = "sluice.cached_tokens"
NUM_IMAGES = "sluice.images"
ENGINE = "sluice.engine"
ROUTING = "sluice.routing.reason"  # why that engine; a tokenizer that chose it expected:
NUM_EXPECTED = "sluice.expected_cached_tokens"  # in its cache
NUM_AHEAD = "sluice.expected_tokens_ahead"  # of other prompts, to be computed before
NUM_PREEMPTIONS = "sluice.preemptions"
NUM_DRAFTED = "sluice.drafted_tokens"
NUM_ACCEPTED = "sluice.accepted_tokens"
ACCEPTED_AT = "sluice.accepted_tokens_by_position"
NUM_EVENTS_DROPPED = "sluice.events_dropped"
RANK = "sluice.rank"
RANK_TIME = "sluice.rank.time"  # seconds of the step on this rank
RANK_SUMS = "sluice.rank.sums"  # of these, in sums with other ranks
NUM_ROWS = "sluice.requests"
