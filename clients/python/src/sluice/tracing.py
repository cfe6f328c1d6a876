"""The W3C trace context of a call: that of the application's current OpenTelemetry span, if it has one.

OpenTelemetry is no dependency: it is used only if the application has imported it.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

Trace: TypeAlias = Callable[[], tuple[tuple[str, str], ...]]  # traceparent, and tracestate where there is one


def current_trace() -> tuple[tuple[str, str], ...]:
    """Returns traceparent and tracestate of the current span; nothing without one."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return (("traceparent", parent), *([("tracestate", state)] if state else []))
