"""Turns what the gateway observes into spans, metrics and log lines. Implements the protocols of `observed`."""

import functools
import time
from collections.abc import Callable, Mapping

import grpc

from sluice_server.services.messages.messages import Envelope
from sluice_server.services.telemetry import catalogue, names
from sluice_server.services.telemetry.gathering import Defer, at_once
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.observed import RefusedRequest, RequestTrace, RequestUsage, StartedRequest
from sluice_server.services.telemetry.phases import Attribute, Phase, PhaseEvent
from sluice_server.services.telemetry.queue import QUEUE_SIZE
from sluice_server.services.telemetry.request_log import Ended, RequestLog
from sluice_server.services.telemetry.spans import Parent, SpanPlacement, inside, is_sampled, under
from sluice_server.services.telemetry.tracing import Tracer

Attributes = Mapping[str, Attribute]

MAX_WAITING = QUEUE_SIZE // 2  # spans queued for the collector; from this number on, refusals are only counted
SILENT = RequestLog(is_on=False, shows_prompts=False)
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_HARMLESS = frozenset({"OK", "CANCELLED"})  # ends for which the spans of an unsampled request are not needed
_EVENTS = {
    "replayed": names.EVENT_REPLAYED,
    "handed_off": names.EVENT_HANDED_OFF,
    "hedge_won": names.EVENT_HEDGE_WON,
    "reattached": names.EVENT_REATTACHED,
}


class GatewayObserver:
    """Observes a gateway. `keep` tells the ring to send the spans of a request that was not sampled; `defer` makes the
    spans and the line of an ended request, later if it likes."""

    def __init__(
        self,
        tracer: Tracer,
        metrics: Metrics,
        keep: Callable[[Envelope], None],
        log: RequestLog = SILENT,
        defer: Defer = at_once,
    ) -> None:
        self._log = log
        self._tracer = tracer
        self._metrics = metrics
        self._keep = keep
        self._defer = defer
        for kind, num in _tokens(RequestUsage()):  # so that a kind that no request has is there, too
            metrics.count(catalogue.TOKENS, kind, num=num)

    def request_started(self, started: StartedRequest) -> RequestTrace:
        """Place the RPC's span and, inside it, the generation's span, which is the parent of later stages' spans."""
        return _Trace(self._tracer, self._metrics, started, self._keep, self._log, self._defer)

    def refused(self, refused: RefusedRequest) -> str:
        """Count and log a refused request, and make a span of it, as for every failure."""
        self._metrics.count(catalogue.REFUSALS, refused.error.reason)
        traceparent = self._tell_refused(refused)
        self._log.refused(refused, traceparent)
        return traceparent

    def count(self, name: str, **labels: str) -> None:
        """Count an event that belongs to no request."""
        self._metrics.count(catalogue.EVENTS, name, labels.get("reason", ""))

    def _tell_refused(self, refused: RefusedRequest) -> str:
        """Make the RPC span and, inside it, the span of the refusal. Half of the queue is kept free of refusals, so
        that a flood of them does not displace the spans of admitted requests."""
        tracer, reason, now = self._tracer, refused.error.reason, time.monotonic()
        if not tracer.is_on or tracer.num_waiting >= MAX_WAITING:
            return refused.traceparent
        rpc = under(Parent(refused.traceparent, refused.tracestate))
        tracer.record_placed(
            inside(rpc), Phase(names.SPAN_ADMISSION, now, now, {names.TENANT: refused.tenant}, error=reason)
        )
        code = _CODE_NAMES.get(int(refused.error.code), "UNKNOWN")
        tracer.record_placed(rpc, _rpc_phase(refused.method, (now, now), code, reason), is_server=True)
        return rpc.header()


class _Trace:
    """Observes one request."""

    def __init__(
        self,
        tracer: Tracer,
        metrics: Metrics,
        started: StartedRequest,
        keep: Callable[[Envelope], None],
        log: RequestLog,
        defer: Defer,
    ) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._keep = keep
        self._log = log
        self._defer = defer
        self._started = started
        self._start = time.monotonic()
        self._ttft_s = 0.0
        self._span_events: list[PhaseEvent] = []
        self._operation = _operation(started)
        self.traceparent = caller = started.envelope.traceparent
        self._work: SpanPlacement | None = None
        if tracer.is_on:
            self._rpc = under(Parent(caller, started.envelope.tracestate))
            self._work = inside(self._rpc)
            is_wanted = is_sampled(caller) if caller else tracer.sampling.takes(self._work.trace_id)
            self.traceparent = self._work.header(is_sampled=is_wanted)

    def first_token(self) -> None:
        """Note the time to the first token."""
        self._ttft_s = time.monotonic() - self._start

    def happened(self, name: str, **attributes: int) -> None:
        """Add an event to the generation's span."""
        prefixed = {f"sluice.{key}": value for key, value in attributes.items()}
        self._span_events.append(PhaseEvent(_EVENTS[name], time.monotonic(), prefixed))

    def ended(self, status_code: int, reason: str, used: RequestUsage) -> None:
        """Count, and have both spans and the line made."""
        took = time.monotonic() - self._start
        code = _CODE_NAMES.get(status_code, "UNKNOWN")
        self._count(code, reason or used.finish_reason, used, took)
        if self._work is not None or self._log.is_on:
            self._defer(functools.partial(self._tell, (code, reason), used, took, time.time()))

    def _tell(self, end: tuple[str, str], used: RequestUsage, took_s: float, at_s: float) -> None:
        """Make both spans, and log; `end` is the name of the status and its reason, `at_s` is of the wall clock."""
        self._record(*end, used, took_s)
        self._log.ended(self._started, self.traceparent, end, used, Ended(took_s, at_s))

    def _count(self, code: str, reason: str, used: RequestUsage, took: float) -> None:
        metrics = self._metrics
        metrics.count(catalogue.REQUESTS, self._operation, code, reason)
        metrics.observe(catalogue.DURATION, took, self._operation, code)
        for kind, num in _tokens(used):
            if num:
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

    def _record(self, code: str, reason: str, used: RequestUsage, took_s: float) -> None:
        """Make the spans, unless the request was neither sampled nor slow nor failed."""
        if self._work is None:
            return
        started = self._started
        if not is_sampled(self.traceparent):
            if code in _HARMLESS and took_s < self._tracer.sampling.slow_s:
                return
            self._keep(started.envelope)
        error = "" if code == "OK" else (reason or code)
        name, end = f"{self._operation} {started.envelope.model}", self._start + took_s
        attributes = {**_asked(self._operation, started), **_used(used, self._ttft_s)}
        self._tracer.record_placed(
            self._work, Phase(name, self._start, end, attributes, tuple(self._span_events), error)
        )
        self._tracer.record_placed(
            self._rpc, _rpc_phase(started.method, (self._start, end), code, error), is_server=True
        )


def _tokens(used: RequestUsage) -> tuple[tuple[str, int], ...]:
    """Returns the number of tokens of each kind."""
    return (
        ("prompt", used.num_prompt),
        ("cached", used.num_cached),
        ("image", used.num_image),
        ("completion", used.num_completion),
        ("reasoning", used.num_reasoning),
        ("drafted", used.num_drafted),
        ("accepted", used.num_accepted),
    )


def _rpc_phase(method: str, times: tuple[float, float], code: str, error: str) -> Phase:
    """Returns the phase of a call; `error` is the cause of a failure, whether the server's or the client's."""
    name = _rpc_method(method)
    attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name, names.RPC_STATUS: code}
    return Phase(name, *times, attributes, error=error if code in names.RPC_SERVER_ERRORS else "")


def _rpc_method(method: str) -> str:
    """Returns the method with its service, which is InferenceService unless it is named."""
    return method if "/" in method else f"{names.RPC_SERVICE}/{method}"


def _operation(started: StartedRequest) -> str:
    """Returns the GenAI operation; for a request that generates nothing, the name of its RPC."""
    if started.params is None:
        return started.method.lower()
    return names.OPERATION_CHAT if started.is_chat else names.OPERATION_COMPLETION


def _asked(operation: str, started: StartedRequest) -> Attributes:
    envelope = started.envelope
    attributes: dict[str, Attribute] = {
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


def _used(used: RequestUsage, ttft_s: float) -> Attributes:
    return {
        **_routed(used),
        names.GEN_AI_USAGE_INPUT: used.num_prompt,
        names.GEN_AI_USAGE_OUTPUT: used.num_completion,
        names.GEN_AI_USAGE_REASONING: used.num_reasoning,
        names.GEN_AI_USAGE_CACHED: used.num_cached,
        names.GEN_AI_RESPONSE_FINISH_REASONS: (used.finish_reason,) if used.finish_reason else (),
        names.GEN_AI_RESPONSE_TTFT: ttft_s,
    }


def _routed(used: RequestUsage) -> Attributes:
    """Returns the engine, and why it was that one."""
    if used.routed is None:
        return {}
    found: dict[str, Attribute] = {names.ENGINE: used.engine, names.ROUTING: str(used.routed.reason)}
    if used.routed.num_cached or used.routed.num_waiting:
        found |= {names.NUM_EXPECTED: used.routed.num_cached, names.NUM_AHEAD: used.routed.num_waiting}
    return found
