"""One test for each class of security advisory that servers of language models have had, named after an example.

Each ends with a good request: the service is alive and answers as before.
"""

import ast
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal import api_implementation
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.faults.test_faults_kill import nothing_is_left
from tests.system.service import Service, generate, serve, spec, wait_until

ROOT = Path(__file__).parents[2]
OURS = ("engine", "kernels", "services", "clients", "demo")
DESERIALISERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EXECUTORS = {"eval", "exec", "compile", "__import__"}
Stub = inference_pb2_grpc.InferenceServiceStub


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve() as running:
        yield running


@pytest.fixture
def stub(service: Service) -> Iterator[Stub]:
    """A client; after the test the service must answer a good request of another one, by the same processes.

    The connection of the first may have been cut for what it did.
    """
    before = service.children()
    with service.stub() as made:
        yield made
    with service.stub() as other:
        assert generate(other, spec("import os", 4)).completion_tokens == 4
    assert service.children() == before


def refusal(stub: Stub, wanted: types_pb2.GenerationSpec) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, wanted)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), caught.value.details() or ""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for room in OURS:
        for path in (ROOT / room).rglob("*.py"):
            yield path, ast.parse(path.read_text(), str(path))


def test_cve_2025_32444_no_code_of_ours_deserialises_objects() -> None:
    for path, tree in sources():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & DESERIALISERS, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in EXECUTORS, f"{path}:{node.lineno}"
                assert called not in {"torch.load", "yaml.load", "yaml.unsafe_load"}, f"{path}:{node.lineno}"


def test_cve_2025_30202_nothing_listens_but_the_front_door(service: Service) -> None:
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for child in service.children().values()
        for connection in child.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    host, port = service.address.rsplit(":", 1)
    assert listening == {(host, int(port))}


def test_cve_2025_23319_sockets_of_the_ring_are_private(service: Service) -> None:
    paths = {
        Path(str(connection.laddr))
        for child in service.children().values()
        for connection in child.net_connections(kind="unix")
        if str(connection.laddr).startswith("/")
    }
    assert len(paths) >= 4
    for path in paths:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_cve_2026_41523_checks_hold_in_optimised_python() -> None:
    code = (
        "from sluice_server.engine.checks import check_params\n"
        "from sluice_server.engine.request import Limits, SamplingParams\n"
        "from sluice_server.engine.errors import ServiceError\n"
        "try:\n    check_params(SamplingParams(temperature=float('nan')), Limits(10, 10))\n"
        "except ServiceError as error:\n    print(error.field)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "temperature\n"


def test_cve_2024_8768_empty_prompt(stub: Stub) -> None:
    for empty in (spec("", 4), spec([], 4)):
        assert refusal(stub, empty)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "array", "items": {"type": "nonsense"}}'),
        ("json_schema", "{" * 50_000),
        ("regex", "(" * 40 + "a*" + ")*" * 40 + "b["),
        ("grammar", "start: nothing_of_that_name"),
    ],
    ids=["CVE-2025-48942", "CVE-2025-48942-deep", "CVE-2025-48943", "CVE-2026-105757"],
)
def test_cve_2025_48942_a_bad_constraint_is_one_requests_matter(stub: Stub, kind: str, text: str) -> None:
    wanted = spec("x", 4)
    setattr(wanted.constraint, kind, text)
    assert refusal(stub, wanted)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2025_71379_catastrophic_expressions_do_not_hold_up_others(stub: Stub) -> None:
    wanted = spec("x", 4)
    wanted.constraint.regex = "(a|aa)+" * 20 + "(x+x+)+y{1,1000}"
    try:
        generate(stub, wanted)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2026_116173_more_candidates_than_the_limit(stub: Stub) -> None:
    wanted = spec("x", 4)
    wanted.output.logprobs = 10_000
    assert refusal(stub, wanted)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2026_114051_min_tokens_above_a_max_tokens_that_is_absent(stub: Stub) -> None:
    wanted = types_pb2.GenerationSpec(text="x", sampling=types_pb2.SamplingParams(min_tokens=2**31 - 1))
    assert refusal(stub, wanted)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("field", ["prompt", "stop", "allowed", "bias", "detokenize"])
def test_cve_2026_93840_ids_beyond_the_logits(stub: Stub, field: str) -> None:
    beyond = 1 << 30
    wanted = spec([beyond] if field == "prompt" else [5], 4)
    if field == "stop":
        wanted.stop.token_ids.append(beyond)
    if field == "allowed":
        wanted.sampling.allowed_token_ids.append(beyond)
    if field == "bias":
        wanted.sampling.logit_bias[beyond] = 1.0
    if field == "detokenize":
        with pytest.raises(grpc.RpcError) as caught:
            stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[beyond]))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert refusal(stub, wanted)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2026_105755_two_requests_under_one_client_id_stay_apart(stub: Stub) -> None:
    alone = [generate(stub, spec(prompt, 16)).text for prompt in ("import os", "class Tree:")]
    answers: dict[int, str] = {}

    def ask(index: int, prompt: str) -> None:
        request = inference_pb2.GenerateRequest(spec=spec(prompt, 16))
        answers[index] = stub.Generate(request, timeout=60, metadata=(("x-request-id", "same"),)).outputs[0].text

    threads = [threading.Thread(target=ask, args=one) for one in enumerate(("import os", "class Tree:"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[0], answers[1]] == alone


def test_cve_2026_112266_a_prefix_of_an_id_cancels_no_request(stub: Stub) -> None:
    call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec("import", 64)))
    generation_id = next(iter(call)).accepted.generation_id
    for wrong in (generation_id[:16], generation_id[:-1], generation_id + "0", generation_id.upper()):
        if wrong == generation_id:
            continue
        with pytest.raises(grpc.RpcError) as caught:
            stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id=wrong))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert list(call)[-1].HasField("finished")


@pytest.mark.parametrize("field", ["n", "best_of"], ids=["CVE-2026-34756", "CVE-2024-8939"])
def test_cve_2024_8939_outputs_without_measure(stub: Stub, field: str) -> None:
    wanted = spec("x", 4)
    setattr(wanted.sampling, field, 2**31 - 1)
    assert refusal(stub, wanted)[0] in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}


def test_cve_2026_71486_ids_without_measure_in_detokenize(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5] * 300_000))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2025_62426_a_chat_template_takes_no_code_from_its_variables(stub: Stub) -> None:
    wanted = spec("x", 4)
    message = types_pb2.ChatMessage(role=types_pb2.ROLE_USER)
    message.parts.add(text="{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**9) %}{% endfor %}")
    wanted.chat.messages.append(message)
    try:
        generate(stub, wanted)  # it is text, like any other
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        assert error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}


def test_cve_2025_6242_no_field_of_the_contract_is_a_place_to_fetch_from() -> None:
    seen: set[str] = set()

    def walk(message: Descriptor) -> None:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        for field in message.fields:
            # Fetched from hosts that the operator lists, none by default; see tests/services/media/test_urls.py.
            if field.type == FieldDescriptor.TYPE_STRING and field.full_name != "sluice.v1.Image.url":
                assert not re.search(r"ur[il]|path|file|host", field.name), field.full_name
            if field.message_type is not None and field.message_type.full_name.startswith("sluice."):
                walk(field.message_type)

    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods:
        walk(method.input_type)
    assert len(seen) > 20


def test_cve_2026_22778_errors_tell_nothing_of_the_inside(stub: Stub) -> None:
    told = [
        refusal(stub, wanted)[1] for wanted in (spec("", 4), spec("x", 4, temperature=float("nan")), spec([1 << 30]))
    ]
    for text in told:
        assert not re.search(r"0x[0-9a-f]{6,}|Traceback|File \"|/site-packages/|<.* object at", text), text


def test_cve_2025_4565_protobuf_is_not_the_recursive_one(service: Service, stub: Stub) -> None:
    assert api_implementation.Type() == "upb"
    deep = b""
    for _ in range(5000):  # chat → messages → parts …: unknown groups nest to any depth
        deep = b"\x0b" + deep + b"\x0c"
    raw = grpc.insecure_channel(service.address)
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = raw.unary_unary("/sluice.v1.InferenceService/Generate")
    with raw, pytest.raises(grpc.RpcError) as caught:
        call(deep, timeout=60)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT}


def test_cve_2023_44487_rapid_reset(service: Service, stub: Stub) -> None:
    request = inference_pb2.StreamGenerateRequest(spec=spec("import", 64))
    for _ in range(2000):
        stub.StreamGenerate(request).cancel()
    wait_until(lambda: nothing_is_left(service), 30, "what was reset at once is still held")
