"""Every name that leaves the service: spans, attributes, metrics. GenAI conventions (development status) and RPC
conventions (release candidate) of OpenTelemetry as of the schema below."""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"

SPAN_TOKENIZE = "tokenize"
SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_DECODE = "decode"
SPAN_DETOKENIZE = "detokenize"

RPC_SERVICE = "sluice.v1.InferenceService"

OPERATION_CHAT = "chat"
OPERATION_COMPLETION = "text_completion"

RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
ERROR_TYPE = "error.type"

GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TTFT = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_REASONING = "gen_ai.usage.reasoning.output_tokens"
GEN_AI_USAGE_CACHED = "gen_ai.usage.cache_read.input_tokens"

METRIC_REQUESTS = "sluice_requests"
METRIC_TOKENS = "sluice_tokens"
METRIC_EVENTS = "sluice_gateway_events"
METRIC_DURATION = "gen_ai_server_request_duration_seconds"
METRIC_TTFT = "gen_ai_server_time_to_first_token_seconds"
METRIC_TPOT = "gen_ai_server_time_per_output_token_seconds"
METRIC_SPANS_DROPPED = "sluice_spans_dropped_total"
