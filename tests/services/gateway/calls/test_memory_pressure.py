"""A gateway refuses new requests while there is hardly any memory left, and finishes those that run."""

import grpc
from sluice.v1 import control_pb2

from sluice_server.services.gateway.calls.load import FRESH_S
from sluice_server.services.memory.level import Level
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.processes import Report
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import Rig, generation, running, settings, stream_request, unary_request


def report(rig: Rig, engine: str, level: Level) -> None:
    rig.lane.handle(Report(engine, 1, Load(), served_token=True, memory_level=int(level)))


async def test_new_requests_are_refused_and_running_ones_end_well() -> None:
    async with running() as rig:
        stream = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.gateway.memory_level = lambda: Level.CRITICAL
        error, reason = await failure(rig.stub.Generate(unary_request()))
        assert (error.code(), reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY_PRESSURE")
        rig.ring.play(*generation(submit, ["a", "b"]))
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        rig.gateway.memory_level = lambda: Level.WARN
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        call.cancel()


async def test_engines_count_by_the_one_that_has_most_left() -> None:
    async with running(settings(stages=(("t0",), ("e0", "e1"), ("d0",)))) as rig:
        report(rig, "e0", Level.CRITICAL)
        report(rig, "e1", Level.WARN)
        load = (await rig.control.GetLoad(control_pb2.GetLoadRequest())).load
        assert [one.memory_level for one in load.engines] == [3, 2] and load.memory_level == 1
        assert not rig.lane.manager.is_memory_short()
        report(rig, "e1", Level.CRITICAL)
        error, reason = await failure(rig.stub.Generate(unary_request()))
        assert reason == "MEMORY_PRESSURE" and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        now_s = rig.lane.manager.clock()
        rig.lane.manager.clock = lambda: now_s + FRESH_S + 1  # what is old does not count
        assert not rig.lane.manager.is_memory_short()
