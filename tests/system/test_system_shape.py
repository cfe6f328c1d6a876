"""Two gateways on one port, two tokenizers and two detokenizers; and the errors that a new user meets first."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import generate, serve, spec

SLUICE = (sys.executable, "-m", "sluice_server")


def sluice(*arguments: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    return subprocess.run([*SLUICE, *arguments], capture_output=True, text=True, input=stdin, timeout=60, check=False)


def test_two_of_each_serve_as_one() -> None:
    with serve("--gateways", "2", "--tokenizers", "2", "--detokenizers", "2") as service:
        names = {f"{role}-{i}" for role in ("gateway", "tokenizer", "detokenizer") for i in (0, 1)}
        assert set(service.children()) == names | {"engine-0"}
        outputs = []
        for _ in range(12):  # a connection each: the kernel spreads them over the gateways
            with service.stub() as stub:
                outputs.append(generate(stub, spec("def mean(values):", 8)))
        assert {output.text for output in outputs} == {outputs[0].text}
        assert all(output.completion_tokens == 8 for output in outputs)


def test_what_a_user_gets_wrong_and_the_next_request_is_served() -> None:
    with serve() as service, service.stub() as stub, service.control() as control:
        model = control.ListModels(control_pb2.ListModelsRequest()).models[0]
        wrong = {
            "empty": (spec(""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            "ten megabytes": (spec("x" * 10_000_000), grpc.StatusCode.INVALID_ARGUMENT, "1048576"),
            "over the context": (spec([5] * 3000), grpc.StatusCode.INVALID_ARGUMENT, "2048"),
            "id outside": (spec([model.vocab_size]), grpc.StatusCode.INVALID_ARGUMENT, str(model.vocab_size)),
            "not a number": (spec("x", temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
            "negative": (spec("x", top_p=-1.0), grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
            "not built": (types_pb2.GenerationSpec(text="x", adapter="a"), grpc.StatusCode.UNIMPLEMENTED, "adapter"),
            "model": (types_pb2.GenerationSpec(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "other"),
        }
        for name, (request, code, said) in wrong.items():
            with pytest.raises(grpc.RpcError) as caught:
                generate(stub, request)
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() is code, name
            assert said in (caught.value.details() or ""), name
            assert generate(stub, spec("x", 3)).completion_tokens == 3
        ids = stub.Tokenize(inference_pb2.TokenizeRequest(text="import os")).tokens
        back = stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[token.id for token in ids]))
        assert back.text == "import os"
        shown = json.loads(
            sluice("generate", "import", "--address", service.address, "--max-tokens", "5", "--json").stdout
        )
        assert {"text", "token_ids", "finish_reason", "usage", "timings"} <= set(shown)
        assert (len(shown["token_ids"]), shown["finish_reason"]) == (5, "length")


def test_serve_refuses_before_it_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refusals: dict[tuple[str, ...], str] = {
            ("--listen", f"127.0.0.1:{port}"): "Address already in use",
            ("--model", "no/such/dir/at/all"): "no such directory",
            ("--block-size", "0"): "--block-size: 0 is below 1",
            ("--dtype", "float8"): "--dtype: 'float8' is not one of auto, float32, bfloat16",
            ("--role", "engine"): "--inbox: is needed with --role",
            ("--listen", "nonsense"): "--listen: 'nonsense' is not host:port",
        }
        if not os.path.exists("/dev/nvidiactl"):
            for ranks in "12":
                wanted = ("--device", "cuda", "--tensor-parallel-size", ranks, "--allow-shared-cores")
                refusals[wanted] = "no CUDA device is usable here; use --device cpu"
        for arguments, message in refusals.items():
            result = sluice("serve", *arguments)
            assert result.returncode == 2, arguments
            assert message in result.stderr
            assert "Traceback" not in result.stderr


def test_a_checkpoint_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    byte_level_bpe(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    result = sluice("serve", "--model", str(tmp_path), "--listen", "127.0.0.1:0")
    assert result.returncode == 1
    assert "holds only pickle weights" in result.stderr


def test_no_server_listens() -> None:
    result = sluice("generate", "x", "--address", "127.0.0.1:1")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no server answers at 127.0.0.1:1; start one with `sluice serve`" in result.stderr
