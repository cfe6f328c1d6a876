import asyncio
import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.engine.executor.computing import Computing
from sluice_server.services.gateway.access.identity import CALLER, LOCAL
from sluice_server.services.gateway.calls import server
from sluice_server.services.gateway.calls.large import LargeRequestQueue
from sluice_server.services.gateway.calls.refusal import turn_away
from sluice_server.services.gateway.contract.status import to_rpc
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.processes import Report
from tests.services.gateway.fake_ring import (
    SETTINGS,
    Rig,
    generation,
    running,
    settings,
    unary_request,
)


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
        handlers = rig.gateway.handlers()
        tables = {
            **server.inference_table(handlers),
            **server.control_table(handlers.control, handlers.models, handlers.profiles, handlers.caches),
            **handlers.adapter.table(),
            "x": server.refusal("x", functools.partial(turn_away, rig.gateway.observer, "x")),
        }
        assert [name for name, handler in tables.items() if not inspect.iscoroutinefunction(handler)] == []


async def test_models_are_loaded_under_a_supervisor_only() -> None:
    async with running() as rig:
        for call in (
            rig.control.UnloadModel(control_pb2.UnloadModelRequest(model="toy")),
            rig.control.SetAlias(control_pb2.SetAliasRequest(alias="a")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="under a supervisor only") as caught:
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
        how = Computing(
            "cpu", "native", "v4", "v4", "float32", "int8", "bfloat16", 7, 2, "--threads", "jemalloc", ("slow",)
        )
        rig.lane.handle(Report("e0", 1, Load(num_running=3, step_s=0.5), served_token=True, computing=how))
        models = await rig.control.ListModels(control_pb2.ListModelsRequest())
        model = await rig.control.GetModel(control_pb2.GetModelRequest(model="toy"))
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert [one.id for one in models.models] == ["toy"] == [model.model.id]
        assert model.model.state == control_pb2.MODEL_STATE_READY
        assert (model.model.quantization, model.model.kv_cache_dtype, model.model.kernels) == ("int8", "bfloat16", "v4")
        assert list(info.engines) == [
            control_pb2.EngineInfo(
                engine_id="e0",
                device="cpu",
                mode="native",
                kernels="v4",
                instruction_set="v4",
                dtype="float32",
                quantization="int8",
                kv_cache_dtype="bfloat16",
                threads=2,
                allocator="jemalloc",
                notes=["slow"],
            )
        ]
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
        assert {"sluice.v1.InferenceService", "sluice.v1.ControlService", "inference.GRPCInferenceService"} <= names
        assert {await health(rig, name) for name in names} == {health_pb2.HealthCheckResponse.SERVING}


def test_error_details() -> None:
    status = to_rpc(invalid("top_p", "2 is not in (0, 1]", limit=1), {"generation_id": "g"})
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("sluice", "INVALID_PARAMETER")
    assert dict(info.metadata) == {"limit": "1", "generation_id": "g"}
    assert bad.field_violations[0].field == "top_p"


async def test_calls_that_the_loop_has_not_taken_yet_are_not_cancelled() -> None:
    """With more than 1,000 waiting calls, grpc ends random ones as CANCELLED, which is not a status of ours."""
    async with running() as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(2000)]
        assert Counter([await call.code() for call in calls]) == {grpc.StatusCode.OK: len(calls)}


async def test_large_requests_are_answered_whatever_they_are() -> None:
    async with running() as rig:
        method = "/sluice.v1.InferenceService/Generate"
        generate: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = rig.channel.unary_unary(method)
        too_long = unary_request(text="x" * (rig.lane.manager.settings.limits.max_prompt_bytes + 1))
        raw = [b"\xff" * 200_000, too_long.SerializeToString()]
        ends = await asyncio.gather(*[generate(body) for body in 4 * raw], return_exceptions=True)
        codes = [end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 8
        reasons = ["bytes" in (end.details() or "") for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert reasons == [False, True] * 4  # each for itself


async def test_a_large_request_beyond_what_may_wait_is_turned_away_unparsed() -> None:
    parsed, turned_away = list[bytes](), list[ServiceError]()

    async def away(context: object, error: ServiceError) -> NoReturn:
        turned_away.append(error)
        raise error

    async def behaviour(request: object, context: object) -> object:
        return request

    def parse(data: bytes) -> server.MalformedRequest:
        parsed.append(data)
        return server.MalformedRequest()

    lane = LargeRequestQueue(lambda: 0.0, max_bytes=10)
    CALLER.set(LOCAL)
    handle = server.guarded(behaviour, "Request", away, parse, lane)
    async with lane.turn(LOCAL.tenant, 1):
        context: Any = None  # nothing here looks at it
        waiting = asyncio.ensure_future(handle(b"8 bytes.", context))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="wait to be read"):
            await handle(b"3 b", context)
        assert not parsed
    with pytest.raises(ServiceError):
        await waiting
    assert parsed == [b"8 bytes."] and [one.reason for one in turned_away] == ["QUEUE_FULL", "INVALID_PARAMETER"]
