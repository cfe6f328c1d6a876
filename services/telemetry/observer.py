"""What the gateway observes, turned into spans and metrics: the binding of its protocols to real telemetry."""

import time

import grpc

from services.gateway.observer import RequestTrace, Started, Used
from services.telemetry import names
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Attributes, Tracer, finish, parent_context, traceparent_of

_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class GatewayObserver:
    """Follows a gateway."""

    def __init__(self, tracer: Tracer, metrics: Metrics) -> None:
        self._tracer = tracer
        self._metrics = metrics

    def request_started(self, started: Started) -> RequestTrace:
        """Open the RPC span and, inside it, the span of the generation, under which later stages hang theirs."""
        return _Trace(self._tracer, self._metrics, started)

    def count(self, name: str, **labels: str) -> None:
        """Count an event that belongs to no request."""
        self._metrics.event(name, labels.get("reason", ""))


class _Trace:
    """Follows one request."""

    def __init__(self, tracer: Tracer, metrics: Metrics, started: Started) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._ttft_s = 0.0
        parent = parent_context(started.traceparent, started.tracestate) if tracer.is_on else None
        method = f"{names.RPC_SERVICE}/{started.method}"
        rpc: Attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        self._rpc = tracer.begin(method, parent, "server", rpc)
        operation = _operation(started)
        self._work = tracer.begin(f"{operation} {started.model}", self._rpc, "internal", _asked(operation, started))
        self.traceparent = traceparent_of(self._work, started.traceparent)

    def first_token(self) -> None:
        """Note the time to the first token."""
        self._ttft_s = time.monotonic() - self._start

    def ended(self, status_code: int, reason: str, used: Used) -> None:
        """Close both spans and count."""
        took = time.monotonic() - self._start
        code = _CODE_NAMES.get(status_code, "UNKNOWN")
        error = "" if status_code == 0 else (reason or code)
        finish(self._work, _used(used, self._ttft_s), error)
        finish(self._rpc, {names.RPC_STATUS: code}, error)
        self._metrics.request_ended(code, reason)
        self._metrics.observe(names.METRIC_DURATION, took)
        for kind, num in (
            ("prompt", used.num_prompt),
            ("cached", used.num_cached),
            ("completion", used.num_completion),
        ):
            self._metrics.tokens(kind, num)
        if self._ttft_s:
            self._metrics.observe(names.METRIC_TTFT, self._ttft_s)
        if self._ttft_s and used.num_completion > 1:
            self._metrics.observe(names.METRIC_TPOT, (took - self._ttft_s) / (used.num_completion - 1))


def _operation(started: Started) -> str:
    """The GenAI operation; requests that generate nothing are named by their RPC."""
    if started.params is None:
        return started.method.lower()
    return names.OPERATION_CHAT if started.is_chat else names.OPERATION_COMPLETION


def _asked(operation: str, started: Started) -> Attributes:
    attributes: dict[str, str | int | float | bool] = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: "sluice",
        names.GEN_AI_REQUEST_MODEL: started.model,
        names.GEN_AI_RESPONSE_ID: started.request_id,
    }
    if started.params is not None:
        params = started.params
        attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = params.max_tokens
        attributes[names.GEN_AI_REQUEST_TEMPERATURE] = params.temperature
        attributes[names.GEN_AI_REQUEST_TOP_P] = params.top_p
        attributes[names.GEN_AI_REQUEST_TOP_K] = params.top_k
        attributes[names.GEN_AI_REQUEST_SEED] = str(params.seed)  # 64 bits unsigned do not fit an attribute
    return attributes


def _used(used: Used, ttft_s: float) -> Attributes:
    return {
        names.GEN_AI_USAGE_INPUT: used.num_prompt,
        names.GEN_AI_USAGE_OUTPUT: used.num_completion,
        names.GEN_AI_USAGE_REASONING: used.num_reasoning,
        names.GEN_AI_USAGE_CACHED: used.num_cached,
        names.GEN_AI_RESPONSE_FINISH_REASONS: (used.finish_reason,) if used.finish_reason else (),
        names.GEN_AI_RESPONSE_TTFT: ttft_s,
    }
