"""An exception in a real process: a status that names the role, and one log line with the rest."""

import json

import grpc
import pytest
from sluice.v1 import inference_pb2

from sluice_server.services.telemetry.logs import MAX_REPEATS
from tests.faults.faulty import faults
from tests.system.service import serve, spec

TRACE = "ab" * 16
BUG = "sluice_server.services.tokenizer.encoding:TextEncoder._encode"  # texts: not the warm-up, which has ids


def test_a_bug_in_the_tokenizer_is_named_told_and_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    with serve("--log-format", "json", environment=faults(bug=BUG)) as service, service.stub() as stub:
        seen = []
        for _ in range(50):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(
                    inference_pb2.GenerateRequest(spec=spec("hello")),
                    timeout=60,
                    metadata=(("traceparent", f"00-{TRACE}-{'cd' * 8}-01"),),
                )
            seen.append((caught.value.code(), caught.value.details()))
    told = f"the tokenizer failed while encoding this request (trace {TRACE})"
    assert seen == [(grpc.StatusCode.INTERNAL, told)] * 50
    written = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    lines = [one for one in written if "failed while encoding" in one["message"]]
    assert len(lines) == MAX_REPEATS and len({one["request_id"] for one in lines}) == MAX_REPEATS
    for one in lines:
        assert (one["process"], one["role"], one["trace_id"]) == ("tokenizer-0", "tokenizer", TRACE)
        assert "a bug at 0x7f3a99" in one["exception"] and "encoding.py" in one["exception"]
