"""The four roles alone over TCP with CURVE, as containers run them without a supervisor; and `sluice bench` on them."""

import json
from pathlib import Path

import grpc

from tests.system.roles import four_roles, sluice
from tests.system.service import generate, spec, wait_until


def test_roles_alone_over_tcp_with_curve(tmp_path: Path) -> None:
    with four_roles(tmp_path / "keys") as roles:
        service = roles.service
        wait_until(roles.is_serving, 60, "the ring of lone roles did not come up")
        with service.stub() as stub:
            assert generate(stub, spec("def mean(values):", 8)).completion_tokens == 8
            # Larger than a frame: chunks over TCP. Too long for the model, which the tokenizer says in exact tokens.
            try:
                generate(stub, spec("def f(x): return x\n" * 30_000))
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "tokens" in (error.details() or "")
            else:
                raise AssertionError("a prompt over the context was taken")
        report = tmp_path / "bench.json"
        load = ("--rate", "50", "--requests", "12", "--input-len", "8", "--output-len", "8")
        result = sluice("bench", "--address", service.address, *load, "--json", str(report))
        assert result.returncode == 0, result.stderr
        figures = json.loads(report.read_text())
        assert figures["output_tokens"] == 12 * 8


def test_tcp_without_keys_is_refused() -> None:
    result = sluice("serve", "--role", "engine", "--inbox", "tcp://127.0.0.1:5555", "--detokenizer-peers", "d=ipc:///x")
    assert result.returncode == 2
    assert "--ring-keys" in result.stderr and "sluice keys" in result.stderr
