"""What the gateway observes, turned into spans and metrics: the binding of its protocols to real telemetry."""

import time
from collections.abc import Callable

import grpc

from services.gateway.observer import Refused, RequestTrace, Started, Used
from services.messages import Envelope
from services.telemetry import catalogue, names
from services.telemetry.metrics import Metrics
from services.telemetry.request_log import RequestLog
from services.telemetry.tracing import (
    QUEUE_SIZE,
    SAMPLED,
    Attributes,
    Tracer,
    finish,
    parent_context,
    trace_id_of,
    traceparent_of,
)

MAX_WAITING = QUEUE_SIZE // 2  # spans on their way to the collector, from which on refusals are counted only
SILENT = RequestLog(is_on=False, shows_prompts=False)
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_HARMLESS = frozenset({"OK", "CANCELLED"})  # ends for which nobody looks at a trace that was not sampled
_EVENTS = {"replayed": names.EVENT_REPLAYED, "reattached": names.EVENT_REATTACHED}


class GatewayObserver:
    """Follows a gateway. `keep` tells the ring that a request's spans are wanted, though it was not sampled."""

    def __init__(
        self, tracer: Tracer, metrics: Metrics, keep: Callable[[Envelope], None], log: RequestLog = SILENT
    ) -> None:
        self._log = log
        self._tracer = tracer
        self._metrics = metrics
        self._keep = keep

    def request_started(self, started: Started) -> RequestTrace:
        """Open the RPC span and, inside it, the span of the generation, under which later stages hang theirs."""
        return _Trace(self._tracer, self._metrics, started, self._keep, self._log)

    def refused(self, refused: Refused) -> str:
        """Count a request that was not let in, and tell of it in a span, as of everything that fails."""
        self._metrics.count(catalogue.REFUSALS, refused.error.reason)
        traceparent = self._tell_refused(refused)
        self._log.refused(refused, traceparent)
        return traceparent

    def count(self, name: str, **labels: str) -> None:
        """Count an event that belongs to no request."""
        self._metrics.count(catalogue.EVENTS, name, labels.get("reason", ""))

    def _tell_refused(self, refused: Refused) -> str:
        """Make the RPC span and, inside it, what failed. A flood of refusals leaves the other half of the queue to
        requests that were let in."""
        tracer, reason = self._tracer, refused.error.reason
        if not tracer.is_on or tracer.num_waiting >= MAX_WAITING:
            return refused.traceparent
        code = _CODE_NAMES.get(int(refused.error.code), "UNKNOWN")
        method = _rpc_method(refused.method)
        parent = parent_context(refused.traceparent, refused.tracestate)
        rpc = tracer.begin(method, parent, "server", {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method})
        finish(tracer.begin(names.SPAN_ADMISSION, rpc, "internal", {names.TENANT: refused.tenant}), {}, reason)
        finish(rpc, {names.RPC_STATUS: code}, reason if code in names.RPC_SERVER_ERRORS else "")
        return traceparent_of(rpc, refused.traceparent)


class _Trace:
    """Follows one request."""

    def __init__(
        self,
        tracer: Tracer,
        metrics: Metrics,
        started: Started,
        keep: Callable[[Envelope], None],
        log: RequestLog,
    ) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._keep = keep
        self._log = log
        self._started = started
        self._envelope = envelope = started.envelope
        self._start = time.monotonic()
        self._ttft_s = 0.0
        caller = envelope.traceparent
        parent = parent_context(caller, envelope.tracestate) if tracer.is_on else None
        method = _rpc_method(started.method)
        rpc: Attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        self._rpc = tracer.begin(method, parent, "server", rpc)
        self._operation = _operation(started)
        name = f"{self._operation} {envelope.model}"
        self._work = tracer.begin(name, self._rpc, "internal", _asked(self._operation, started))
        self._is_sampled = caller.endswith(SAMPLED) if caller else self._is_chosen()
        self.traceparent = traceparent_of(self._work, caller, is_sampled=self._is_sampled)

    def first_token(self) -> None:
        """Note the time to the first token."""
        self._ttft_s = time.monotonic() - self._start

    def happened(self, name: str, **attributes: int) -> None:
        """An event of the generation's span."""
        if self._work is not None:
            self._work.add_event(_EVENTS[name], {f"sluice.{key}": value for key, value in attributes.items()})

    def ended(self, status_code: int, reason: str, used: Used) -> None:
        """Close both spans and count."""
        took = time.monotonic() - self._start
        code = _CODE_NAMES.get(status_code, "UNKNOWN")
        self._finish(code, reason, used, took)
        self._log.ended(self._started, self.traceparent, (code, reason), used, took)
        self._count(code, reason or used.finish_reason, used, took)

    def _count(self, code: str, reason: str, used: Used, took: float) -> None:
        metrics = self._metrics
        metrics.count(catalogue.REQUESTS, self._operation, code, reason)
        metrics.observe(catalogue.DURATION, took, self._operation, code)
        for kind, num in (
            ("prompt", used.num_prompt),
            ("cached", used.num_cached),
            ("completion", used.num_completion),
            ("reasoning", used.num_reasoning),
            ("drafted", used.num_drafted),
            ("accepted", used.num_accepted),
        ):
            metrics.count(catalogue.TOKENS, kind, num=num)
        if self._ttft_s:
            metrics.observe(catalogue.TTFT, self._ttft_s)
        if self._ttft_s and used.num_completion > 1:
            metrics.observe(catalogue.TPOT, (took - self._ttft_s) / (used.num_completion - 1))
        if used.num_prompt:
            metrics.observe(catalogue.PROMPT_LENGTH, used.num_prompt)
            metrics.observe(catalogue.OUTPUT_LENGTH, used.num_completion)
        if used.timings is not None:
            metrics.observe(catalogue.PREFILL_TIME, used.timings.prefill_s)
            metrics.observe(catalogue.DECODE_TIME, used.timings.decode_s)

    def _is_chosen(self) -> bool:
        return self._work is None or self._tracer.sampling.takes(trace_id_of(self._work))

    def _finish(self, code: str, reason: str, used: Used, took_s: float) -> None:
        """End the spans, or let go of them: one that is never ended goes nowhere."""
        if self._work is None:
            return
        if not self._is_sampled:
            if code in _HARMLESS and took_s < self._tracer.sampling.slow_s:
                return
            self._keep(self._envelope)
        error = "" if code == "OK" else (reason or code)
        finish(self._work, _used(used, self._ttft_s), error)
        finish(self._rpc, {names.RPC_STATUS: code}, error if code in names.RPC_SERVER_ERRORS else "")


def _rpc_method(method: str) -> str:
    """With its service, which is InferenceService unless it is named."""
    return method if "/" in method else f"{names.RPC_SERVICE}/{method}"


def _operation(started: Started) -> str:
    """The GenAI operation; requests that generate nothing are named by their RPC."""
    if started.params is None:
        return started.method.lower()
    return names.OPERATION_CHAT if started.is_chat else names.OPERATION_COMPLETION


def _asked(operation: str, started: Started) -> Attributes:
    envelope = started.envelope
    attributes: dict[str, str | int | float | bool] = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: "sluice",
        names.GEN_AI_REQUEST_MODEL: envelope.model,
        names.GEN_AI_RESPONSE_MODEL: f"{envelope.model}@{envelope.revision}",
        names.GEN_AI_RESPONSE_ID: envelope.request_id,
        names.TENANT: envelope.tenant,
    }
    if started.params is not None:
        params = started.params
        attributes[names.GEN_AI_REQUEST_STREAM] = started.is_streamed
        attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = params.max_tokens
        attributes[names.GEN_AI_REQUEST_TEMPERATURE] = params.temperature
        attributes[names.GEN_AI_REQUEST_TOP_P] = params.top_p
        attributes[names.GEN_AI_REQUEST_TOP_K] = params.top_k
        attributes[names.GEN_AI_REQUEST_SEED] = str(params.seed)  # 64 bits unsigned do not fit an attribute
        attributes[names.GEN_AI_REQUEST_CHOICES] = params.n
        attributes[names.GEN_AI_REQUEST_FREQUENCY_PENALTY] = params.frequency_penalty
        attributes[names.GEN_AI_REQUEST_PRESENCE_PENALTY] = params.presence_penalty
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
