"""Constrained output from the whole service: it follows; wrong constraints are refused, and the next one is served."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.schemas import SCHEMAS
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import serve

Stub = inference_pb2_grpc.InferenceServiceStub
ENDLESS = 'root ::= x{1000}\nx ::= y{1000}\ny ::= "a"{1000}'


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with serve() as service, service.stub() as stub:
        yield stub


def request(constraint: dict[str, Any], num: int = 200, **sampling: Any) -> inference_pb2.GenerateRequest:  # noqa: ANN401 # of SamplingParams
    return inference_pb2.GenerateRequest(
        spec=types_pb2.GenerationSpec(
            text="def main():",
            sampling=types_pb2.SamplingParams(max_tokens=num, **{"temperature": 1.0, "seed": 3, **sampling}),
            constraint=types_pb2.Constraint(**constraint),
        )
    )


@pytest.mark.parametrize("name", ["order", "unicode-keys", "expression"])
def test_outputs_follow_their_schema(stub: Stub, name: str) -> None:
    answer = stub.Generate(request({"json_schema": json.dumps(SCHEMAS[name])}, n=3), timeout=60)
    assert len(answer.outputs) == 3
    for output in answer.outputs:
        assert output.finish_reason == types_pb2.FINISH_REASON_EOS
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])


def test_a_choice_with_a_stop_string_ends_where_it_matches(stub: Stub) -> None:
    asked = request({"choice": {"texts": ["alpha beta", "alpha gamma"]}})
    asked.spec.stop.strings.append("a b")
    asked.spec.sampling.logit_bias[0] = 0.0
    texts = {stub.Generate(asked, timeout=60).outputs[0].text for asked.spec.sampling.seed in range(8)}
    assert texts == {"alph", "alpha gamma"}


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        ({"json_schema": '{"items": {"type": "foo"}}'}, "constraint.json_schema", ("/items",)),
        ({"regex": "a("}, "constraint.regex", ("character 2",)),
        ({"grammar": ENDLESS}, "constraint.grammar", ("within 1 s", "256 MiB")),  # whichever it reaches first
    ],
)
def test_what_is_wrong_is_refused_and_the_next_is_served(
    stub: Stub, constraint: dict[str, Any], field: str, words: tuple[str, ...]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(stub.Generate, request(constraint), timeout=60)
        assert stub.Generate(request({"regex": "ab?"}), timeout=60).outputs[0].text in ("a", "ab")
        error = refused.exception()
    assert isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)
    assert status is not None and any(one in status.message for one in words)
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details) and bad.field_violations[0].field == field


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
PARAMETERS = json.dumps(SCHEMAS["person"])


def calling(choice: dict[str, Any]) -> inference_pb2.GenerateRequest:
    asked = types_pb2.Chat(
        messages=[types_pb2.ChatMessage(role=types_pb2.ROLE_USER, parts=[types_pb2.ContentPart(text="hello")])],
        tools=[types_pb2.Tool(name="person", parameters=PARAMETERS), types_pb2.Tool(name="nothing")],
        tool_choice=types_pb2.ToolChoice(**choice),
    )
    params = types_pb2.SamplingParams(max_tokens=900, temperature=3.0, seed=5)
    return inference_pb2.GenerateRequest(spec=types_pb2.GenerationSpec(chat=asked, sampling=params))


def test_calls_that_are_required_are_made(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(vocab=400, context=2048))
    byte_level_bpe(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    with serve("--model", str(tmp_path), "--dtype", "float32") as service, service.stub() as stub:
        for asked in (calling({"name": "person"}), calling({"mode": types_pb2.TOOL_MODE_REQUIRED})):
            (output,) = stub.Generate(asked, timeout=60).outputs
            assert output.tool_calls and not output.text
            for call in output.tool_calls:
                assert call.name in ("person", "nothing")
                if call.name == "person":
                    jsonschema.validate(json.loads(call.arguments), SCHEMAS["person"])
