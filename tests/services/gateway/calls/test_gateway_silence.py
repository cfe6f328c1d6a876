"""What the gateway does while processes of the ring are silent, or lost messages."""

import grpc
import pytest
from grpc_health.v1 import health_pb2

from sluice_server.services.gateway.recovery.liveness import UNCHANGED, Liveness
from sluice_server.services.gateway.requests.answers import MAX_FUTILE_ATTEMPTS
from sluice_server.services.messages.processes import Probe, Role, Visit
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.calls.test_gateway_server import health
from tests.services.gateway.fake_ring import (
    running,
    settings,
    stream_request,
    text_of,
    unary_request,
)


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


async def test_after_a_silence_of_the_ring_streams_go_on_as_they_were() -> None:
    async with running(settings(probe_timeout_s=0.05)) as rig:
        call = aiter(rig.stub.StreamGenerate(stream_request()))
        submit = await rig.ring.next_submit()
        rig.ring.answers_probes = False
        await rig.ring.until(lambda: not rig.gateway.is_serving)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        rig.ring.answers_probes = True
        await rig.ring.until(lambda: rig.gateway.is_serving)
        rig.ring.play(text_of(submit, 0, "a", first=True, last=True))  # no process was replaced: it is the same attempt
        assert [event.WhichOneof("event") async for event in call][-1] == "finished"
        assert len(rig.ring.submits) == 1


async def test_a_silence_that_lasts_fails_what_is_open() -> None:
    async with running(settings(probe_timeout_s=0.05, recovery_timeout_s=0.1)) as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        rig.ring.answers_probes = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "process of this server was lost" in (caught.value.details() or "")


async def test_what_a_replaced_process_worked_on_is_sent_again_and_goes_on() -> None:
    async with running() as rig:
        call = aiter(rig.stub.StreamGenerate(stream_request()))
        first = await rig.ring.next_submit()
        rig.ring.play(text_of(first, 0, "a", first=True), text_of(first, 1, "b"))
        rig.ring.epoch = 2
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        again = rig.ring.submits[1]
        assert (again.work, again.resume) == (first.work, (pack_ids([0, 1]),))
        assert (again.envelope.request_id, again.envelope.attempt) == (first.envelope.request_id, 1)
        rig.ring.play(text_of(first, 2, "stale"), text_of(again, 2, "c"), text_of(again, 3, "d", last=True))
        events = [event async for event in call]
        assert "".join(event.delta.text for event in events) == "abcd"
        seqs = [event.delta.seq for event in events if event.HasField("delta")]
        assert seqs == list(range(1, len(seqs) + 1))
        assert rig.gateway.is_serving


async def test_a_request_that_ends_its_process_twice_is_not_tried_a_third_time() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        rig.ring.epoch = 2
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        rig.ring.epoch = 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert len(rig.ring.submits) == 2


async def test_a_message_that_was_lost_on_its_way_costs_a_replay() -> None:
    async with running() as rig:
        call = aiter(rig.stub.StreamGenerate(stream_request()))
        first = await rig.ring.next_submit()
        rig.ring.play(text_of(first, 0, "a", first=True), text_of(first, 2, "c"))
        again = rig.ring.submits[-1]
        assert (again.envelope.attempt, again.resume) == (1, (pack_ids([0]),))
        rig.ring.play(text_of(again, 1, "b", last=True))
        assert "".join([event.delta.text async for event in call]) == "ab"


async def test_gaps_without_end_are_given_up() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        for _ in range(MAX_FUTILE_ATTEMPTS + 1):
            rig.ring.play(text_of(rig.ring.submits[-1], 1, "b"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len(rig.ring.submits) == MAX_FUTILE_ATTEMPTS + 1


def test_liveness_waits_longer_for_slow_engines() -> None:
    liveness = Liveness("g", 1, (("t",), ("e",), ("d",)), timeout_s=5.0)
    liveness.send(0.0)
    assert not liveness.complete
    liveness.send(5.5)
    assert liveness.is_lost(0.1, {"e"}) and not liveness.is_lost(1.0, {"e"}) and not liveness.lost_engines(0.1)
    way = ("t", "e", "d")
    assert liveness.returned(Probe("g", 2, way, (Visit(Role.ENGINE, "e", 1, 0),), epoch=1)) == UNCHANGED
    assert liveness.complete == {"e"} and not liveness.is_lost(0.1, {"e"})
    assert liveness.returned(Probe("g", 2, way, (Visit(Role.ENGINE, "e", 2, 0),), epoch=1)).new == {"e"}
    liveness.forget()
    assert liveness.returned(Probe("g", 2, way, (Visit(Role.ENGINE, "e", 2, 0),), epoch=1)) == UNCHANGED
    assert not liveness.complete  # that probe says nothing about the ring after the loss
    liveness.send(0.1)
    assert liveness.returned(Probe("g", 3, way, (Visit(Role.ENGINE, "e", 2, 0, lost=1),), epoch=1)).missed == {"e"}
    assert liveness.complete == {"e"}
