"""One trace across four processes, asserted at a receiver that speaks real OTLP; Prometheus in every process."""

import secrets
import urllib.request

from sluice.v1 import inference_pb2

from services.telemetry.collector import Collector
from tests.system.service import serve, spec

RPC = "sluice.v1.InferenceService/StreamGenerate"
STAGES = {"tokenize": "tokenizer-0", "queue": "engine-0", "prefill": "engine-0", "decode": "engine-0"}


def test_one_tree_across_four_processes(unused_tcp_port: int) -> None:
    collector = Collector()
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    try:
        options = ("--otlp-endpoint", collector.endpoint, "--metrics-port", str(unused_tcp_port))
        with serve(*options) as service, service.stub() as stub:
            request = inference_pb2.StreamGenerateRequest(spec=spec("def f(x):", 16))
            metadata = (("traceparent", f"00-{trace_id}-{caller}-01"),)
            call = stub.StreamGenerate(request, metadata=metadata, timeout=60)
            assert [event.WhichOneof("event") for event in call][-1] == "finished"
            names = {*STAGES, "detokenize", "text_completion demo", RPC}
            spans = {span.name: span for span in collector.wait_for(trace_id, names, 10)}
            assert set(spans) == names
            for port in range(unused_tcp_port, unused_tcp_port + 4):
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
                assert "sluice_ring_in_frames_total" in text
    finally:
        collector.stop()
    assert spans[RPC].parent_id == caller
    work = spans["text_completion demo"]
    assert work.parent_id == spans[RPC].span_id
    for name, process in {**STAGES, "detokenize": "detokenizer-0"}.items():
        assert spans[name].parent_id == work.span_id
        assert spans[name].process == process
        assert spans[name].start_ns >= work.start_ns - 1_000_000
    assert spans["prefill"].end_ns == spans["decode"].start_ns
    assert work.attributes["gen_ai.usage.output_tokens"] == "16"
