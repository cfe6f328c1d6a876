import asyncio
import inspect
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from sluice.v1 import control_pb2, inference_pb2

from engine.errors import ServiceError, invalid
from services.gateway import server
from services.gateway.control import Control
from services.gateway.converse import Converse
from services.gateway.errors import to_rpc
from services.gateway.inference import Inference
from services.gateway.liveness import Liveness
from services.gateway.neighbours import Neighbours
from services.gateway.oip.service import OpenInference
from services.gateway.parking import Parking
from services.messages import Load, Probe, Report, Role, Visit
from tests.services.gateway.fake_ring import SETTINGS, Rig, generation, running, settings, stream_request, unary_request


async def health(rig: Rig, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


def test_option_keys_exist_in_grpc() -> None:
    folder = Path(grpc.__file__).parent / "_cython"
    (binary,) = (path.read_bytes() for path in folder.glob("cygrpc*.so"))
    keys = [key for key, _ in server.options(SETTINGS)]
    assert [key for key in keys if key.encode() not in binary] == []
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in binary


async def test_every_handler_is_a_coroutine_function() -> None:
    async with running(wait=False) as rig:
        parking = Parking(asyncio.get_running_loop().call_later, 1)
        desk, inference = rig.gateway.desk, Inference(rig.gateway.desk, parking, Neighbours("g0", {}, ""))
        adapter = OpenInference(desk, inference.stream_generate)
        handlers = server.Handlers(inference, Converse(desk, parking), Control(desk, rig.gateway.drain), adapter)
        tables = {
            **server.inference_table(handlers),
            **server.control_table(handlers.control),
            **adapter.table(),
            "x": server.refusal("x"),
        }
        assert [name for name, handler in tables.items() if not inspect.iscoroutinefunction(handler)] == []


async def test_rpcs_that_are_not_built_say_so() -> None:
    async with running() as rig:
        for call in (
            rig.stub.Embed(inference_pb2.EmbedRequest()),
            rig.control.LoadModel(control_pb2.LoadModelRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "garbage", [b"\x0a\x03\x22\x01\xff", b"\xff\xff\xff", b"\x0a\x80"], ids=["utf-8", "tag", "length"]
)
@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_bytes_that_are_no_request_are_an_invalid_argument(method: str, garbage: bytes) -> None:
    async with running() as rig:
        path = f"/{server.INFERENCE.full_name}/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "Generate":
                unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = rig.channel.unary_unary(path)
                await unary(garbage)
            else:
                stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = rig.channel.unary_stream(path)
                await stream(garbage).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request: is not a valid" in (caught.value.details() or "")


async def test_not_serving_until_a_probe_is_back_and_a_token_was_made() -> None:
    async with running(wait=False) as rig:
        rig.ring.answers_probes = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await health(rig, "sluice.v1.InferenceService") == health_pb2.HealthCheckResponse.NOT_SERVING
        rig.ring.answers_probes = True
        await rig.ring.until(lambda: rig.gateway.is_serving)
        while await health(rig, "sluice.v1.InferenceService") != health_pb2.HealthCheckResponse.SERVING:
            await rig.ring.until(rig.ring.changed.is_set)
        assert await health(rig, "") == health_pb2.HealthCheckResponse.SERVING


async def test_silence_of_the_ring_fails_what_is_open_and_it_recovers() -> None:
    async with running(settings(probe_timeout_s=0.05)) as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        rig.ring.answers_probes = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not rig.gateway.is_serving
        rig.ring.answers_probes = True
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert len(rig.ring.cancels) == 1


async def test_a_replaced_process_fails_what_is_open() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        rig.ring.epoch = 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert "process of this server was lost" in (caught.value.details() or "")
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert rig.gateway.is_serving


async def test_port_in_use_is_said_clearly() -> None:
    async with running() as rig:
        with pytest.raises(ServiceError, match=f"cannot listen on 127.0.0.1:{rig.port}"):
            async with running(settings(listen=f"127.0.0.1:{rig.port}")):
                pass


async def test_drain_refuses_new_work_and_lets_the_running_finish() -> None:
    async with running() as rig:
        call = rig.stub.Generate(unary_request())
        submit = await rig.ring.next_submit()
        stopping = asyncio.create_task(rig.gateway.stop(30.0))
        await rig.ring.until(lambda: not rig.gateway.is_serving)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request())
        rig.ring.play(*generation(submit, ["a"]))
        answer = await call
        await stopping
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert answer.outputs[0].text == "a"


async def test_models_info_and_load() -> None:
    async with running() as rig:
        rig.gateway.deliver(Report("e0", 1, Load(num_running=3, step_s=0.5), served_token=True))
        models = await rig.control.ListModels(control_pb2.ListModelsRequest())
        model = await rig.control.GetModel(control_pb2.GetModelRequest(model="toy"))
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert [one.id for one in models.models] == ["toy"] == [model.model.id]
        assert model.model.state == control_pb2.MODEL_STATE_READY
        assert (info.gateway_id, info.limits.max_prompt_bytes) == ("g0", 1 << 20)
        assert [(one.engine_id, one.running_requests) for one in load.load.engines] == [("e0", 3)]
        assert load.load.open_requests == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.control.GetModel(control_pb2.GetModelRequest(model="x"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(version: str) -> None:
    async with running() as rig:
        method = rig.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        names = {one.name for one in answer.list_services_response.service}
        assert {"sluice.v1.InferenceService", "sluice.v1.ControlService"} <= names


def test_error_details() -> None:
    status = to_rpc(invalid("top_p", "2 is not in (0, 1]", limit=1), {"generation_id": "g"})
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("sluice", "INVALID_PARAMETER")
    assert dict(info.metadata) == {"limit": "1", "generation_id": "g"}
    assert bad.field_violations[0].field == "top_p"


def test_liveness_waits_longer_for_slow_engines() -> None:
    liveness = Liveness("g", (("e",),), timeout_s=5.0)
    liveness.send(0.0)
    assert not liveness.is_complete
    liveness.send(5.5)
    assert liveness.is_lost(step_s=0.1) and not liveness.is_lost(step_s=1.0)
    assert liveness.returned(Probe("g", 2, ("e",), (Visit(Role.ENGINE, "e", 1, 0),))) is None
    assert liveness.is_complete and not liveness.is_lost(step_s=0.1)
    assert liveness.returned(Probe("g", 2, ("e",), (Visit(Role.ENGINE, "e", 2, 0),))) is Role.ENGINE
