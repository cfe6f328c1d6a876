"""Every field of every request at its limits: values inside are served, values outside are refused by field name."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.services.gateway.contract.fields import NOT_BUILT
from sluice_server.services.messages.details import Detokenized, Embedded, Timings, Tokenized
from sluice_server.services.messages.messages import Result, Submit
from sluice_server.services.messages.work import Detokenize, Embed, Tokenize
from tests.services.gateway.contract.limits_table import (
    CANCEL,
    CLASSIFY,
    CONTROL,
    DETOKENIZE,
    EMBED,
    FRAMES,
    OPENED,
    RERANK,
    SCORE,
    SMALL,
    SPEC,
    TOKENIZE,
    Edge,
    Fields,
)
from tests.services.gateway.fake_ring import Rig, generation, running, unary_request
from tests.services.gateway.talker import Talker

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: {"INVALID_PARAMETER", "CONTEXT_LENGTH_EXCEEDED"},
    grpc.StatusCode.UNIMPLEMENTED: {"FEATURE_UNSUPPORTED"},
    grpc.StatusCode.NOT_FOUND: {"MODEL_NOT_FOUND", "GENERATION_NOT_FOUND", "IMAGE_NOT_FOUND"},
}


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of the fields that hold values, without those that are refused as a whole."""
    for field in descriptor.fields:
        name = prefix + field.name
        if name in NOT_BUILT:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            assert field.message_type is not None
            yield from leaves(field.message_type, name + ".")
        else:
            yield name


def test_every_field_has_its_place_in_the_table() -> None:
    tables: dict[type[Message], Mapping[str, Edge]] = {
        types_pb2.GenerationSpec: SPEC,
        inference_pb2.TokenizeRequest: TOKENIZE,
        inference_pb2.DetokenizeRequest: DETOKENIZE,
        inference_pb2.EmbedRequest: EMBED,
        inference_pb2.ClassifyRequest: CLASSIFY,
        inference_pb2.RerankRequest: RERANK,
        inference_pb2.ScoreRequest: SCORE,
        inference_pb2.CancelGenerationRequest: CANCEL,
    }
    frames: Any = inference_pb2.ConverseRequest.DESCRIPTOR
    known = {path for path in FRAMES if not path.startswith(("append.message", "update.stop"))}
    walked = {path for path in leaves(frames) if not path.startswith(("open.spec.", "append.message.", "update.stop."))}
    assert walked == known
    for message, table in tables.items():
        descriptor: Any = message.DESCRIPTOR
        assert set(leaves(descriptor)) == table.keys(), message.__name__


def answer(rig: Rig, submit: Submit) -> None:
    """The ring's answer to any request."""
    match submit.work:
        case Tokenize():
            rig.lane.handle(Result(submit.envelope, Tokenized(b"", {})))
        case Detokenize():
            rig.lane.handle(Result(submit.envelope, Detokenized("")))
        case Embed():
            num = len(submit.work.inputs)
            rig.lane.handle(Result(submit.envelope, Embedded((bytes(32),) * num, (1,) * num, 0, Timings())))
        case _:
            request = rig.lane.manager.requests.get(submit.envelope.request_id)
            for text in generation(submit, ["a"]):
                for index in range(len(request.outputs) if request is not None else 0):
                    rig.ring.play(_of_output(text, index))


def _of_output(text: Any, index: int) -> Any:  # noqa: ANN401 # a Text
    return msgspec.structs.replace(text, output_index=index)


class Walk:
    """Sends one request after the other and checks the answers."""

    def __init__(self, rig: Rig, path: str, ask: Any) -> None:  # noqa: ANN401 # any unary call
        self.rig, self.path, self.ask = rig, path, ask

    async def good(self, fields: Fields) -> None:
        try:
            await self.ask(fields)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"{self.path}: {str(fields)[:200]} was refused: {error.details()}") from None

    async def bad(self, fields: Fields) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(fields)
            raise AssertionError(f"{self.path}: {str(fields)[:200]} was accepted")
        error = caught.value
        status = rpc_status.from_call(error)
        assert error.code() in REFUSALS and status is not None, f"{self.path}: {error.code()} {error.details()}"
        info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info) and info.domain == "sluice"
        assert info.reason in REFUSALS[error.code()], info.reason
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert any(detail.Unpack(violations) for detail in status.details)
            assert len(violations.field_violations) == 1 and violations.field_violations[0].description
            assert len(error.details() or "") < 1000


@pytest.mark.parametrize("path", SPEC)
async def test_generate(path: str) -> None:
    async def ask(fields: Fields) -> None:
        spec = types_pb2.GenerationSpec(**fields)
        call = rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec), timeout=10)
        async for _ in call:
            pass

    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        await run(Walk(rig, path, ask), SPEC[path])


@pytest.mark.parametrize("path", TOKENIZE)
async def test_tokenize(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Tokenize(inference_pb2.TokenizeRequest(**fields)))
        await run(walk, TOKENIZE[path])


@pytest.mark.parametrize("path", DETOKENIZE)
async def test_detokenize(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Detokenize(inference_pb2.DetokenizeRequest(**fields)))
        await run(walk, DETOKENIZE[path])


@pytest.mark.parametrize("path", EMBED)
async def test_embed(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Embed(inference_pb2.EmbedRequest(**fields)))
        await run(walk, EMBED[path])


@pytest.mark.parametrize("path", CLASSIFY)
async def test_classify(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Classify(inference_pb2.ClassifyRequest(**fields)))
        await run(walk, CLASSIFY[path])


@pytest.mark.parametrize("path", RERANK)
async def test_rerank(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Rerank(inference_pb2.RerankRequest(**fields)))
        await run(walk, RERANK[path])


@pytest.mark.parametrize("path", SCORE)
async def test_score(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: rig.stub.Score(inference_pb2.ScoreRequest(**fields)))
        await run(walk, SCORE[path])


@pytest.mark.parametrize("path", CANCEL)
async def test_cancel(path: str) -> None:
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(
            rig, path, lambda fields: rig.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(**fields))
        )
        await run(walk, CANCEL[path])


@pytest.mark.parametrize("path", FRAMES)
async def test_frames(path: str) -> None:
    async with running(SMALL) as rig:
        talk = Talker(rig)
        for tag, (frame, is_good) in enumerate(_cases(FRAMES[path]), start=1):
            if "open" not in frame:
                await talk.open(tag, keep_input_open=True, **OPENED)
                await talk.kinds(1)
            await talk.send(tag, **frame)
            if is_good:
                await talk.send(0, ping=inference_pb2.Ping(nonce=tag))
                assert (await talk.read()).pong.nonce == tag, frame
                await talk.send(tag, cancel=inference_pb2.Cancel())
            _, failed, info = await talk.failure()
            assert info.reason in {"CLIENT_CANCELLED"} if is_good else REFUSALS[_code(failed.code)], frame
        assert await talk.end() == grpc.StatusCode.OK
        assert rig.lane.manager.books.admission.num_tokens == 0


def _cases(edge: Edge) -> list[tuple[Fields, bool]]:
    return [(fields, True) for fields in edge.good] + [(fields, False) for fields in edge.bad]


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)


@pytest.mark.parametrize("path", CONTROL)
async def test_control(path: str) -> None:
    method, _, _ = path.partition(".")
    asked = getattr(control_pb2, f"{method}Request")
    async with running(SMALL) as rig:
        rig.ring.script = lambda submit: answer(rig, submit)
        walk = Walk(rig, path, lambda fields: getattr(rig.control, method)(asked(**fields)))
        await run(walk, CONTROL[path])


async def run(walk: Walk, edge: Edge) -> None:
    for fields in edge.good:
        await walk.good(fields)
    for fields in edge.bad:
        await walk.bad(fields)
    await walk.rig.stub.Generate(unary_request())  # whatever was asked, the next good request is served
    assert walk.rig.lane.manager.books.admission.num_requests == 0
    assert len(asyncio.all_tasks()) < 60  # one for each method waits for calls
