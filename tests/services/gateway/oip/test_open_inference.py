import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.parameters import CHOICE
from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.gateway.calls import guard
from sluice_server.services.gateway.oip import translate
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.gateway.oip.service import SERVICE
from sluice_server.services.messages.work import Generate
from tests.services.gateway.fake_ring import Rig, generation, running, settings, text_of

CLIENT = Path(__file__).with_name("triton_client.py")


def request(text: str = "hi", sampling: str | None = None, **switches: bool) -> oip.ModelInferRequest:
    made = oip.ModelInferRequest(model_name="toy", id="r")
    texts = {"text_input": text, "sampling_parameters": sampling}
    for name, value in texts.items():
        if value is not None:
            made.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value.encode())
    for name, on in switches.items():
        made.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(on)
    return made


def text_of_raw(response: oip.ModelInferResponse) -> str:
    return response.raw_output_contents[0][4:].decode()


async def run_client(rig: Rig) -> dict[str, Any]:
    """The findings of Triton's own client."""
    command = (sys.executable, str(CLIENT), f"127.0.0.1:{rig.port}", "toy")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


async def test_tritons_own_client(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    digest = digest_of("k").hex()
    file.write_text(f'[[keys]]\nsha256 = "{digest}"\ntenant = "acme"\nscopes = ["generate", "control"]\n')
    async with running(settings(access_file=file)) as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        found = await run_client(rig)
        assert (found["live"], found["ready"], found["other"], found["server"]) == (True, True, False, "sluice")
        assert found["tensors"][:4] == ["text_input", "stream", "sampling_parameters", "exclude_input_in_output"]
        assert found["whole"] == {"id": "", "text_output": "pabc"}
        for at in "01":
            texts = [one["text_output"] for one in found["streams"] if one["id"] == at]
            assert "".join(texts) == "abc" and texts[0] == "a"
        counts = {"finish_reason": "length", "num_input_tokens": 3, "num_output_tokens": 3}
        assert found["extras"] == [{"id": "x", "text_output": "qabc", **counts}]
        errors = [one["error"] for one in found["mixed"] if "error" in one]
        assert len(errors) == 1 and "temperature" in errors[0]
        assert "".join(one["text_output"] for one in found["mixed"] if "error" not in one) == "abc"
        assert "NOT_FOUND" in found["refused"]
        assert found["config"] == {
            "name": "toy",
            "input": ["text_input", "stream", "sampling_parameters"],
            "types": ["TYPE_STRING", "TYPE_BOOL", "TYPE_STRING"],
            "optional": [False, True, True],
            "decoupled": True,
        }
        assert found["index"] == [["toy", "1", "READY", ""]]
        assert found["statistics"] == {"name": "toy", "success": 5, "fail": 0, "has_time": True, "phases": 5}
        asked = rig.ring.submits[-1]
        assert asked.envelope.tenant == "acme" and isinstance(asked.work, Generate)
        assert (asked.work.params.max_tokens, asked.work.params.ignore_eos) == (3, True)


async def test_every_method_is_a_coroutine_and_has_its_scope() -> None:
    async with running(wait=False) as rig:
        table = rig.gateway.handlers().adapter.table()
        assert all(inspect.iscoroutinefunction(handler) for handler in table.values())
        names = {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
        assert names == {f"/{SERVICE.full_name}/{name}" for name in table}
        assert names == {name for name in guard.SCOPES if name.startswith("/inference.")}


def stream_of(rig: Rig) -> "grpc.aio.StreamStreamCall[oip.ModelInferRequest, oip.ModelStreamInferResponse]":
    method: grpc.aio.StreamStreamMultiCallable[oip.ModelInferRequest, oip.ModelStreamInferResponse]
    method = rig.channel.stream_stream(
        f"/{SERVICE.full_name}/ModelStreamInfer",
        request_serializer=oip.ModelInferRequest.SerializeToString,
        response_deserializer=oip.ModelStreamInferResponse.FromString,
    )
    return method()


async def test_a_stream_that_is_cancelled_cancels_all_its_generations() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        call = stream_of(rig)
        for _ in range(3):
            await call.write(request(stream=True))
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        call.cancel()
        await rig.ring.until(lambda: len(rig.ring.cancels) == 3)
        await rig.ring.until(lambda: not len(rig.lane.manager.requests))


async def test_a_stream_says_which_response_is_its_last_if_asked_to() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        asked = request(stream=True)
        asked.parameters[translate.WANTS_FINAL].bool_param = True
        call = stream_of(rig)
        await call.write(asked)
        await call.done_writing()
        answers = [answer.infer_response async for answer in call]
        marks = [one.parameters[translate.FINAL].bool_param for one in answers]
        assert (marks, [len(one.outputs) for one in answers]) == ([False, True], [1, 0])


async def test_what_is_no_request_is_an_error_and_the_stream_lives_on() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        raw: grpc.aio.StreamStreamMultiCallable[bytes, oip.ModelStreamInferResponse] = rig.channel.stream_stream(
            f"/{SERVICE.full_name}/ModelStreamInfer", response_deserializer=oip.ModelStreamInferResponse.FromString
        )
        call = raw()
        await call.write(b"\xff\xff\xff")
        answer = await call.read()
        assert isinstance(answer, oip.ModelStreamInferResponse) and "INVALID_ARGUMENT" in answer.error_message
        await call.write(request(stream=True).SerializeToString())
        answer = await call.read()
        assert isinstance(answer, oip.ModelStreamInferResponse) and text_of_raw(answer.infer_response) == "a"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


def test_parameters_as_tritons_examples_write_them() -> None:
    sampling = '{"temperature": "0.1", "top_p": "0.95", "top_k": -1, "max_tokens": "100", "stop": "x", "seed": -1}'
    asked = translate.read(request(sampling=sampling, stream=True))
    params = asked.spec.sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.1, 0.95, 0, 100)
    assert (params.seed, list(asked.spec.stop.strings), asked.streams) == ((1 << 64) - 1, ["x"], True)
    assert not params.HasField("min_p")
    plain = translate.read(request())
    assert (plain.spec.sampling.max_tokens, plain.prefix, plain.streams) == (16, "hi", False)
    assert translate.read(request(exclude_input_in_output=True)).prefix == ""


def raw_request(*raw: bytes) -> oip.ModelInferRequest:
    made = oip.ModelInferRequest(model_name="toy", raw_input_contents=raw)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    return made


def typed(name: str, datatype: str, *shape: int) -> oip.ModelInferRequest:
    made = request()
    made.inputs.add(name=name, datatype=datatype, shape=shape)
    return made


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (oip.ModelInferRequest(), "text_input: is missing"),
        (oip.ModelInferRequest(model_version="7"), "its one version"),
        (oip.ModelInferRequest(id="x" * 257), "more than 256"),
        (typed("ghost", "BYTES", 1), "not an input"),
        (typed("text_input", "BYTES", 1), "given twice"),
        (typed("stream", "INT32", 1), "BOOL"),
        (typed("stream", "BOOL", 2), "BOOL"),
        (typed("stream", "BOOL", 1), "0 elements"),
        (raw_request(), "0 elements"),
        (raw_request(b"\x01\x00\x00\x00a", b""), "2 entries for 1"),
        (raw_request(b"\x09\x00\x00\x00a"), "one element of BYTES"),
        (raw_request(b""), "one element of BYTES"),
        (raw_request(b"\x01\x00\x00\x00\xff"), "not UTF-8"),
        (request(sampling="{"), "not a JSON object"),
        (request(sampling="[" * 10_000), "not a JSON object"),
        (request(sampling="[]"), "Expected `object`"),
        (request(sampling='{"beam": 1}'), "unknown field `beam`"),
        (request(sampling='{"temperature": "hot"}'), "temperature"),
        (request(sampling='{"max_tokens": -1}'), "that its field cannot hold"),
        (request(sampling='{"n": 2}'), "one output"),
        (request(stream=True, exclude_input_in_output=False), "cannot be false"),
        (request(return_logprobs=True), "not an input"),
        (oip.ModelInferRequest(outputs=[oip.ModelInferRequest.InferRequestedOutputTensor(name="x")]), "text_input"),
    ],
)
def test_what_is_wrong_is_said(given: oip.ModelInferRequest, reason: str) -> None:
    with pytest.raises(ServiceError, match=reason):
        translate.read(given)


def test_every_number_of_the_table_can_be_asked_for() -> None:
    asked = {row.name: 1 for row in CHOICE}
    sampling = translate.read(request(sampling=json.dumps(asked))).spec.sampling
    assert {field.name: value for field, value in sampling.ListFields()} == asked


def test_parameters_and_outputs_that_are_unknown_are_refused() -> None:
    given = request()
    given.parameters["sequence_id"].int64_param = 7
    with pytest.raises(ServiceError, match="sequence_id"):
        translate.read(given)
    given = request()
    given.outputs.add(name="x")
    with pytest.raises(ServiceError, match="not an output"):
        translate.read(given)
    given = request()
    given.outputs.add(name="finish_reason")
    assert translate.read(given).extras == {"finish_reason"}
