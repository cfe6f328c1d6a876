"""Values of the Python SDK: options, errors, settings, trace context, the package itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import sluice
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import use_span
from sluice.errors import SluiceError, from_failed
from sluice.settings import Settings, channel_options
from sluice.spec import build
from sluice.tracing import current_trace
from sluice.v1 import inference_pb2, types_pb2

from tests.services.certificates import Authority


def test_options_go_where_the_contract_has_them() -> None:
    spec = build(
        "a", {"max_tokens": 3, "temperature": 0.0, "stop": "x", "json_schema": "{}", "priority": 2, "detach": True,
              "bad_words": ["b"], "logprobs": 0, "model": "m", "stop_token_ids": [4], "ignore_eos": True}
    )  # fmt: skip
    assert (spec.text, spec.model, spec.sampling.max_tokens, spec.output.logprobs) == ("a", "m", 3, 0)
    assert spec.sampling.HasField("temperature") and not spec.sampling.HasField("top_k")
    assert (list(spec.stop.strings), list(spec.stop.token_ids), spec.stop.ignore_eos) == (["x"], [4], True)
    assert (spec.constraint.json_schema, list(spec.sampling.bad_words)) == ("{}", ["b"])
    assert spec.scheduling.on_disconnect == types_pb2.DISCONNECT_ACTION_DETACH and spec.scheduling.priority == 2


def test_what_is_not_given_stays_absent() -> None:
    assert build([1, 2], {}) == types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[1, 2]))


def test_every_option_does_something() -> None:
    values: dict[str, object] = {"json_schema": "{}", "regex": "a", "grammar": "a", "choices": ["a"], "stop": "a"}
    for name, kind in sluice.GenerateOptions.__annotations__.items():
        value = values.get(name, {int: 1, float: 0.5, str: "a", bool: True}.get(kind, [1]))
        if name == "bad_words":
            value = ["a"]
        assert build("p", {name: value}) != build("p", {}), name  # type: ignore[misc] # each of its own type


def test_a_spec_of_ones_own_is_a_prompt_and_is_not_changed() -> None:
    own = types_pb2.GenerationSpec(text="a", truncate_prompt_tokens=5)
    assert build(own, {"max_tokens": 3}).truncate_prompt_tokens == 5
    assert not own.HasField("sampling")


def test_a_chat_with_images() -> None:
    made = sluice.chat(("user", [b"file", "what is it?", types_pb2.Image(digest=b"d")]))
    assert [one.WhichOneof("part") for one in made.messages[0].parts] == ["image", "text", "image"]
    assert (made.messages[0].parts[0].image.data, made.messages[0].parts[2].image.digest) == (b"file", b"d")


def test_a_chat() -> None:
    spec = build(sluice.chat(("system", "s"), ("user", "u")), {})
    assert [(one.role, one.parts[0].text) for one in spec.chat.messages] == [
        (types_pb2.ROLE_SYSTEM, "s"),
        (types_pb2.ROLE_USER, "u"),
    ]
    with pytest.raises(ValueError, match="'robot' is no role"):
        sluice.chat(("robot", "x"))


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="'heat' is no option"):
        build("a", {"heat": 1})  # type: ignore[typeddict-unknown-key] # that is the point


def packed(detail: Message) -> AnyMessage:
    made = AnyMessage()
    made.Pack(detail)
    return made


def test_an_error_has_all_its_details() -> None:
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="sluice", metadata={"limit": "3"})
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="f", description="d")
    failed = inference_pb2.Failed(code=8, message="full", generation_id="g", last_seq=4)
    failed.usage.completion_tokens = 6
    failed.details.extend(map(packed, (info, retry, bad)))
    error = from_failed(failed)
    assert isinstance(error, sluice.ResourceExhausted)
    assert (error.reason, error.metadata, error.retry_after_s) == ("QUEUE_FULL", {"limit": "3"}, 1.5)
    assert (error.violations[0].field, error.generation_id, error.last_seq) == ("f", "g", 4)
    assert error.usage is not None and error.usage.completion_tokens == 6
    assert str(error) == "RESOURCE_EXHAUSTED (QUEUE_FULL): full"


def test_each_code_that_a_server_sends_has_its_class() -> None:
    for code in grpc.StatusCode:
        error = from_failed(inference_pb2.Failed(code=code.value[0]))
        ours = code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
        assert error.code is code and (type(error) is not SluiceError) == ours


@pytest.mark.parametrize("target", ["10.0.0.1:1", "example.org:443", "dns:///example.org:443"])
def test_a_key_is_not_sent_in_plaintext(target: str) -> None:
    with pytest.raises(ValueError, match="in plaintext"):
        Settings((target,), token="k")
    assert Settings((target,), tls=sluice.Tls(), token="k").metadata() == (("authorization", "Bearer k"),)


@pytest.mark.parametrize("target", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x", "dns:///localhost:1"])
def test_a_key_may_be_sent_to_this_machine(target: str) -> None:
    assert Settings((target,), token="k").metadata() == (("authorization", "Bearer k"),)


def test_half_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="together"):
        sluice.Tls(certificate=tmp_path / "c").credentials()


@pytest.mark.parametrize("kind", [str, Path])
def test_files_of_tls_are_named_by_a_text_or_a_path(tmp_path: Path, kind: Callable[[Path], str | Path]) -> None:
    certificate, key = Authority().issue("client").write(tmp_path, "client")
    sluice.Tls(kind(certificate), kind(certificate), kind(key)).credentials()
    with pytest.raises(FileNotFoundError, match="none"):
        sluice.Tls(ca=kind(tmp_path / "none")).credentials()


def test_the_trace_of_the_application_goes_on() -> None:
    assert current_trace() == ()
    span = TracerProvider().get_tracer("t").start_span("s")
    with use_span(span):
        ((key, parent),) = current_trace()
    context = span.get_span_context()
    assert (key, parent) == (
        "traceparent",
        f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
    )


def test_grpc_knows_every_channel_argument() -> None:
    folder = Path(grpc.__file__).parent / "_cython"
    (binary,) = (path.read_bytes() for path in folder.glob("cygrpc*.so"))
    keys = [key for key, _ in channel_options(0) if not key.startswith("sluice.")]
    assert [key for key in keys if key.encode() not in binary] == []


def test_no_other_time_limit_of_pings_overrides_that_of_keepalive() -> None:
    for num_targets in (1, 2):
        options = dict(channel_options(0, num_targets))
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
        assert options["grpc.http2.max_pings_without_data"] == 0


def test_the_package_needs_nothing_of_the_server() -> None:
    code = (
        "import sys, sluice; sluice.Client, sluice.AsyncClient; print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "sluice_server", "opentelemetry", "msgspec", "zmq"} & set(found.split())


def test_the_stubs_alone_pull_in_nothing_of_the_client() -> None:
    code = "import sys, sluice.v1.inference_pb2; print('sluice.client' in sys.modules, 'sluice.errors' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "False False\n"


def test_every_public_name_is_there() -> None:
    assert all(getattr(sluice, name) is not None for name in sluice.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Robot'"):
        _ = sluice.Robot
