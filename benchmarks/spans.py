"""Measures the processor time of a request's spans in all four roles, made and sent at a service's pace, and of its
line in the log.

    python -m benchmarks.spans [--rate 70] [--seconds 5] [--rounds 3]

One process plays the gateway, tokenizer, engine and detokenizer of requests that have seven spans, without a collector,
with one that takes everything (in another process), with a black hole, with a line in JSON for each request, and with
spans and lines, in turn. Processor time is that of the whole
process, its sending thread included; beside it that of the thread that serves. Less than benchmarks/telemetry.py shows,
as one process sends what four would.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks.machine import median, write
from benchmarks.telemetry import collector
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.timeline import EventKind, TimelineEvent
from sluice_server.services.engine.trace import EngineTrace, RequestEnd
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import Generate, TextPrompt
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.gathering import Gathering
from sluice_server.services.telemetry.logs import configure
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.observed import RequestUsage, StartedRequest
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.request_log import RequestLog
from sluice_server.services.telemetry.spans import Parent
from sluice_server.services.telemetry.tracing import Tracer

LENGTH = 64
WORK = Generate(TextPrompt("x" * LENGTH), SamplingParams(max_tokens=LENGTH))
USED = RequestUsage(num_prompt=LENGTH, num_completion=LENGTH, finish_reason="length")
RESOURCE = {"service.name": "sluice", "service.instance.id": "all-0"}


class Ring:
    """The telemetry of a request in the four roles, without the rest of them."""

    def __init__(self, endpoint: str, *, has_lines: bool) -> None:
        self.tracer = Tracer.create(RESOURCE, endpoint)
        log = RequestLog(is_on=has_lines, shows_prompts=False)
        self.ends = Gathering(asyncio.get_running_loop().call_later)
        metrics = Metrics("gateway", "all-0")
        self._observer = GatewayObserver(self.tracer, metrics, lambda envelope: None, log, self.ends.add)
        self._engine = EngineTrace(self._record, defer=self.ends.add)

    def request(self) -> None:
        """Records one request from its start to its end."""
        asked = Envelope(secrets.token_hex(16), "all-0", tenant="t", model="demo", revision="r")
        trace = self._observer.request_started(StartedRequest(asked, "StreamGenerate", WORK, is_streamed=True))
        envelope = Envelope(asked.request_id, "all-0", model="demo", traceparent=trace.traceparent)
        now = time.monotonic()
        self._record(envelope, Phase(names.SPAN_TOKENIZE, now, now, {names.NUM_PROMPT: LENGTH}))
        traced = self._engine.begin(envelope, now)
        if traced is not None:
            for mark in (
                TimelineEvent(EventKind.ADMITTED, now),
                TimelineEvent(EventKind.CHUNK, now, LENGTH),
                TimelineEvent(EventKind.FIRST_TOKEN, now),
            ):
                traced.timeline.note(mark)
        self._engine.end(traced, RequestEnd(now, attributes={names.NUM_TOKENS: LENGTH, names.NUM_PREEMPTIONS: 0}))
        self._record(envelope, Phase(names.SPAN_DETOKENIZE, now, now, {names.OUTPUT: 0, names.NUM_TOKENS: LENGTH}))
        trace.first_token()
        trace.ended(0, "", USED)

    def _record(self, envelope: Envelope, phase: Phase) -> None:
        self.tracer.record(envelope.request_id, Parent(envelope.traceparent, envelope.tracestate), phase)


async def measured(endpoint: str, rate: float, seconds: float, *, has_lines: bool) -> tuple[float, float]:
    """Milliseconds per request of the process and of this thread."""
    ring = Ring(endpoint, has_lines=has_lines)
    ring.request()
    await asyncio.sleep(1.5)  # for the first call to the collector
    start, process_s, thread_s, num = time.monotonic(), time.process_time(), time.thread_time(), 0
    while time.monotonic() < start + seconds:
        ring.request()
        num += 1
        await asyncio.sleep(max(0.0, start + num / rate - time.monotonic()))
    ring.ends.flush()
    thread_s = time.thread_time() - thread_s
    ring.tracer.shutdown()
    return 1e3 * (time.process_time() - process_s) / num, 1e3 * thread_s / num


@contextlib.contextmanager
def other_process() -> Iterator[str]:
    """The endpoint of a collector in another process, whose work is not measured."""
    context = multiprocessing.get_context("spawn")
    is_over, endpoints = context.Event(), context.SimpleQueue()
    process = context.Process(target=collect, args=(endpoints, is_over), daemon=True)
    process.start()
    try:
        yield endpoints.get()
    finally:
        is_over.set()
        process.join()


def collect(endpoints: "multiprocessing.SimpleQueue[str]", is_over: Event) -> None:
    """Accepts everything until the end."""
    with collector() as (endpoint, _):
        endpoints.put(endpoint)
        is_over.wait()


def main() -> None:
    """Measure in turn and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=70.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        socket.create_server(("127.0.0.1", 0), backlog=64) as silent,
        other_process() as endpoint,
    ):
        configure("info", "json", "all-0")  # to a file, as the lines of a service
        hole = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(options.rounds):
            for way, (where, lines) in {
                "plain": ("", False),
                "traced": (endpoint, False),
                "black_hole": (hole, False),
                "lines": ("", True),
                "all": (endpoint, True),
            }.items():
                one = asyncio.run(measured(where, options.rate, options.seconds, has_lines=lines))
                found.setdefault(way, []).append(one)
    figures = {
        way: {
            "process_ms": round(median([one[0] for one in ones]), 3),
            "thread_ms": round(median([one[1] for one in ones]), 3),
        }
        for way, ones in found.items()
    }
    command = "python -m benchmarks.spans" + "".join(f" --{name} {num}" for name, num in vars(options).items())
    write("spans", command, {"of_a_request": figures})


if __name__ == "__main__":
    main()
