"""One trace across four processes, asserted at a receiver that speaks real OTLP; Prometheus in every process."""

import contextlib
import itertools
import secrets
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from sluice_server.services.telemetry.collector import Collector, ReceivedSpan
from tests.system.roles import free_ports
from tests.system.service import serve, spec

RPC = "sluice.v1.InferenceService/StreamGenerate"
WORK = "text_completion demo"
STAGES = {"tokenize": "tokenizer-0", "queue": "engine-0", "prefill": "engine-0", "decode": "engine-0"}
WHOLE = {*STAGES, "detokenize", WORK, RPC}
CLOCKS_NS = 1_000_000  # by which two processes' clocks may differ
PROMPT = "def f(x):\n    return x\n" * 12


class Rig(NamedTuple):
    """A service without sampling of its own, and the spans that its processes send."""

    collector: Collector
    stub: inference_pb2_grpc.InferenceServiceStub
    metrics_port: int


class Trace(NamedTuple):
    """One call: its spans by name, its trailers, its status."""

    caller: str
    spans: dict[str, ReceivedSpan]
    trailers: dict[str, str]
    code: grpc.StatusCode


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    collector = Collector()
    with contextlib.ExitStack() as stack:
        stack.callback(collector.stop)
        port = free_ports(4)[0]
        options: tuple[str, ...] = ("--otlp-endpoint", collector.endpoint, "--metrics-port", str(port))
        options += ("--max-num-batched-tokens", "32")
        delay = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # ms
        options += ("--trace-sample-ratio", "0", "--trace-slow-s", "1000")
        service = stack.enter_context(serve(*options, environment=delay))
        yield Rig(collector, stack.enter_context(service.stub()), port)


def ask(  # noqa: PLR0913 # of a request
    rig: Rig, prompt: str, num: int, flags: str, awaited: set[str], timeout_s: float = 60.0, n: int = 1
) -> Trace:
    """Streams, and waits for the spans."""
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    request = inference_pb2.StreamGenerateRequest(spec=spec(prompt, num, n=n))
    metadata = (("traceparent", f"00-{trace_id}-{caller}-{flags}"),)
    call = rig.stub.StreamGenerate(request, metadata=metadata, timeout=timeout_s)
    has_begun = False
    with contextlib.suppress(grpc.RpcError):
        for event in call:
            has_begun |= event.HasField("delta")
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not has_begun:
        awaited = set()  # a busy machine had not come to all of them
    spans = {span.name: span for span in rig.collector.wait_for(trace_id, awaited, 30)}
    trailers = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
    return Trace(caller, spans, trailers, call.code())


def test_one_tree_across_four_processes(rig: Rig) -> None:
    trace = ask(rig, PROMPT, 16, "01", WHOLE)
    spans = trace.spans
    assert set(spans) == WHOLE and trace.code is grpc.StatusCode.OK
    assert spans[RPC].parent_id == trace.caller
    work = spans[WORK]
    assert work.parent_id == spans[RPC].span_id and work.process == spans[RPC].process == "gateway-0"
    for name, process in {**STAGES, "detokenize": "detokenizer-0"}.items():
        assert spans[name].parent_id == work.span_id
        assert spans[name].process == process
        assert spans[name].start_ns >= work.start_ns - CLOCKS_NS
    assert spans["queue"].end_ns == spans["prefill"].start_ns and spans["prefill"].end_ns == spans["decode"].start_ns
    assert not any(span.is_error for span in spans.values())
    assert work.attributes["gen_ai.usage.output_tokens"] == "16"
    assert work.attributes["gen_ai.request.stream"] == "True"
    assert spans[RPC].attributes["rpc.response.status_code"] == "OK"
    chunks = [one for one in spans["prefill"].events if one.name == "sluice.chunk"]
    num_computed = int(work.attributes["gen_ai.usage.input_tokens"]) - int(
        spans["prefill"].attributes["sluice.cached_tokens"]
    )
    assert len(chunks) > 1 and sum(int(one.attributes["sluice.tokens"]) for one in chunks) == num_computed
    assert trace.trailers["x-sluice-trace-id"] == work.trace_id
    assert trace.trailers["traceresponse"] == f"00-{work.trace_id}-{work.span_id}-01"


def test_steps_are_linked_to_their_requests(rig: Rig) -> None:
    """One step per second is traced: requests are sent until one of them was in such a step."""
    for _ in range(10):
        spans = ask(rig, "import os", 400, "01", WHOLE).spans
        work, decode = spans[WORK], spans["decode"]
        told = [one for one in decode.events if one.name == "sluice.step"]
        ours = rig.collector.linked_to((work.trace_id, work.span_id), 30 if told else 0)
        if not ours:
            continue
        for step in ours:
            assert (step.name, step.parent_id, step.process) == ("step", "", "engine-0")
            assert step.trace_id != work.trace_id and spans["queue"].start_ns <= step.start_ns < step.end_ns
            assert step.end_ns <= decode.end_ns and set(step.links) == {(work.trace_id, work.span_id)}
        assert {one.at_ns for one in told} <= {step.end_ns for step in ours}
        return
    raise AssertionError("no step is linked to a request that was asked for")


def test_parts_follow_each_other_within_the_whole(rig: Rig) -> None:
    spans = ask(rig, PROMPT, 400, "01", WHOLE).spans
    parts = [spans[name] for name in STAGES]
    assert all(part.took_ns > 0 for part in parts)
    for before, behind in itertools.pairwise(parts):
        assert behind.start_ns >= before.end_ns - CLOCKS_NS, f"{behind.name} begins before {before.name} has ended"
    assert parts[0].start_ns >= spans[WORK].start_ns - CLOCKS_NS
    assert parts[-1].end_ns <= spans[WORK].end_ns + CLOCKS_NS


def test_what_fails_is_kept_though_it_was_not_sampled(rig: Rig) -> None:
    fine = ask(rig, "import os", 4, "00", set())
    assert fine.code is grpc.StatusCode.OK and fine.trailers["traceresponse"].endswith("-00")
    refused = ask(rig, "def f(x): return x\n" * 2000, 4, "00", {"tokenize", WORK, RPC})
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(refused.spans) == {"tokenize", WORK, RPC}
    assert refused.spans["tokenize"].is_error and refused.spans["tokenize"].process == "tokenizer-0"
    assert refused.spans[WORK].attributes["error.type"] == "CONTEXT_LENGTH_EXCEEDED"
    assert not refused.spans[RPC].is_error, "the client is to blame"
    method = {RPC, "admission"}
    wrong = ask(rig, "import os", 0, "00", method)
    assert wrong.code is grpc.StatusCode.INVALID_ARGUMENT and set(wrong.spans) == method
    assert wrong.spans["admission"].is_error and wrong.spans["admission"].parent_id == wrong.spans[RPC].span_id
    assert wrong.spans[RPC].parent_id == wrong.caller
    assert wrong.trailers["x-sluice-trace-id"] == wrong.spans[RPC].trace_id
    # Long enough to be decoding then, and too short for all of it, on any machine.
    for timeout_s in (0.3, 1.0, 2.0, 4.0, 8.0):
        late = ask(rig, "import os", 1900, "00", WHOLE, timeout_s=timeout_s, n=16)
        if set(late.spans) == WHOLE:
            break
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED and set(late.spans) == WHOLE
    assert late.spans[RPC].is_error and late.spans[WORK].is_error
    assert not rig.collector.wait_for(fine.trailers["x-sluice-trace-id"], set(), 0)


def test_every_process_answers_prometheus(rig: Rig) -> None:
    for port in range(rig.metrics_port, rig.metrics_port + 4):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        assert 'what="frames"' in text and "sluice_ring_in_total{" in text
