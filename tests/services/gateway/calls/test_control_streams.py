"""The streams of ControlService: WatchLoad and Drain."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from sluice.v1 import control_pb2

from sluice_server.services.gateway.calls import control, server
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.processes import Report
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.calls.test_gateway_server import health
from tests.services.gateway.fake_ring import SETTINGS, generation, running, settings, stream_request, unary_request


async def test_load_is_pushed_again_and_again() -> None:
    async with running() as rig:
        call = rig.control.WatchLoad(control_pb2.WatchLoadRequest(interval=Duration(nanos=100_000_000)))
        loads = aiter(call)
        assert (await anext(loads)).load.open_requests == 0
        stream = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        rig.lane.handle(Report("e0", 1, Load(num_waiting=2, num_running=3, num_blocks=9, num_free_blocks=4), True))
        load = (await anext(loads)).load
        engine = load.engines[0]
        assert (load.open_requests, engine.waiting_requests, engine.running_requests) == (1, 2, 3)
        assert (engine.total_blocks, engine.free_blocks) == (9, 4)
        call.cancel()
        stream.cancel()


@pytest.mark.parametrize(
    ("interval", "is_fine"), [((0, 99_999_999), False), ((3600, 0), True), ((3600, 1), False), ((-1, 0), False)]
)
async def test_the_interval_has_bounds(interval: tuple[int, int], is_fine: bool) -> None:
    async with running() as rig:
        wanted = Duration(seconds=interval[0], nanos=interval[1])
        call = rig.control.WatchLoad(control_pb2.WatchLoadRequest(interval=wanted))
        if is_fine:
            assert (await anext(aiter(call))).HasField("load")
            call.cancel()
            return
        error, reason = await failure(anext(aiter(call)))
        assert (error.code(), reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")


async def test_drain_tells_how_far_it_is_and_serves_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "DRAIN_INTERVAL_S", 0.01)
    async with running() as rig:
        stream = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        progress = aiter(rig.control.Drain(control_pb2.DrainRequest()))
        assert (await anext(progress)).open_requests == 1
        error, reason = await failure(rig.stub.Generate(unary_request()))
        assert (error.code(), reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await health(rig, "sluice.v1.InferenceService") == health_pb2.HealthCheckResponse.NOT_SERVING
        rig.ring.play(*generation(submit, ["a"]))
        last = [report async for report in progress][-1]
        assert last.drained and last.open_requests == 0
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        again = [report async for report in rig.control.Drain(control_pb2.DrainRequest())]
        assert [report.drained for report in again] == [True]


async def test_what_runs_when_the_grace_is_over_fails() -> None:
    async with running() as rig:
        stream = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        reports = [report async for report in rig.control.Drain(control_pb2.DrainRequest(grace=Duration()))]
        assert reports[-1].drained
        error, reason = await failure(anext(aiter(stream)))
        assert (error.code(), reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


@pytest.mark.parametrize("grace", [-1, 24 * 3600 + 1])
async def test_the_grace_has_bounds(grace: int) -> None:
    async with running() as rig:
        call = rig.control.Drain(control_pb2.DrainRequest(grace=Duration(seconds=grace)))
        error, _ = await failure(anext(aiter(call)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and rig.gateway.is_serving


def test_connections_age_as_told() -> None:
    options = dict(server.options(settings(max_connection_age_s=2.5)))
    assert options["grpc.max_connection_age_ms"] == 2500
    assert dict(server.options(SETTINGS))["grpc.max_connection_age_grace_ms"] == 3_600_000
