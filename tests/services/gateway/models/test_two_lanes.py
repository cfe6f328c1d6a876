"""Two models behind one gateway: each has its ring, and what happens to one is nothing to the other."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.services.gateway.lanes import unloaded
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.processes import Probe
from tests.services.gateway.calls.test_guard import bearer, entry
from tests.services.gateway.fake_ring import (
    MODEL,
    SETTINGS,
    FakeRing,
    Rig,
    generation,
    public,
    running,
    spec,
    text_of,
    unary_request,
)

DETACH = types_pb2.SchedulingOptions(on_disconnect=types_pb2.DISCONNECT_ACTION_DETACH)


@dataclasses.dataclass
class Two:
    """A gateway with the model `toy` and the model `other`."""

    rig: Rig
    ring: FakeRing
    lane: Lane


@contextlib.asynccontextmanager
async def two(front: GatewaySettings = SETTINGS) -> AsyncIterator[Two]:
    async with running(front) as rig:
        ring = FakeRing()
        stages = (("m1-t0",), ("m1-e0",), ("m1-d0",))
        chosen = dataclasses.replace(front, model=dataclasses.replace(MODEL, id="other"), stages=stages)
        lane = ring.opened(rig.gateway, chosen, "m1")
        await ring.until(lambda: lane.is_serving)
        yield Two(rig, ring, lane)


def answering(ring: FakeRing, word: str) -> None:
    ring.script = lambda submit: ring.play(*generation(submit, [word]))


async def test_requests_go_to_the_ring_of_their_model() -> None:
    async with two() as both:
        answering(both.rig.ring, "toy")
        answering(both.ring, "other")
        for name, word in ((None, "toy"), ("toy", "toy"), ("other", "other")):
            answer = await both.rig.stub.Generate(unary_request(**({} if name is None else {"model": name})))
            assert (answer.model, answer.outputs[0].text) == (word, word)
        assert len(both.rig.ring.submits) == 2 and len(both.ring.submits) == 1


async def test_an_unknown_model_is_refused_with_the_names_of_all() -> None:
    async with two() as both:
        with pytest.raises(grpc.aio.AioRpcError, match="this server serves 'toy', 'other'") as refused:
            await both.rig.stub.Generate(unary_request(model="none"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_loss_of_a_ring_stops_its_model_alone() -> None:
    async with two() as both:
        answering(both.rig.ring, "toy")
        both.ring.answers_probes = False
        both.lane.lost()
        assert (await both.rig.stub.Generate(unary_request())).outputs[0].text == "toy"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await both.rig.stub.Generate(unary_request(model="other"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and both.rig.gateway.is_serving
        both.ring.answers_probes = True
        answering(both.ring, "again")
        await both.ring.until(lambda: both.lane.is_serving)
        assert (await both.rig.stub.Generate(unary_request(model="other"))).outputs[0].text == "again"


async def test_one_stream_carries_generations_of_both() -> None:
    async with two() as both:
        answering(both.rig.ring, "toy")
        answering(both.ring, "other")
        talk = both.rig.stub.Converse()
        for tag, name in ((1, "toy"), (2, "other")):
            await talk.write(inference_pb2.ConverseRequest(tag=tag, open=inference_pb2.Open(spec=spec(model=name))))
        await talk.done_writing()
        found = {one.tag: one.accepted.model async for one in talk if one.HasField("accepted")}
        assert found == {1: "toy", 2: "other"}


async def test_each_ring_is_told_how_many_requests_of_both_generate() -> None:
    def told() -> int:
        return [one.num_generating for one in both.ring.emitted if isinstance(one, Probe)][-1]

    async with two() as both:
        calls = [
            both.rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(model=name)))
            for name in ("toy", "other", "other")
        ]
        await both.ring.until(lambda: len(both.ring.submits) == 2)
        submit, *_ = both.ring.submits  # the other one stays without a token
        both.ring.play(text_of(submit, 0, "a", first=True))
        first = await both.rig.ring.next_submit()
        both.rig.ring.play(text_of(first, 0, "a", first=True))
        await both.ring.until(lambda: told() == 2)
        both.rig.ring.play(text_of(first, 1, "b", last=True))
        await both.ring.until(lambda: told() == 1)
        for call in calls:
            call.cancel()


async def test_a_generation_is_cancelled_and_resumed_where_it_runs() -> None:
    async with two() as both:
        call = both.rig.stub.StreamGenerate(
            inference_pb2.StreamGenerateRequest(spec=spec(model="other", scheduling=DETACH))
        )
        submit = await both.ring.next_submit()
        both.ring.play(text_of(submit, 0, "a", first=True))
        assert [(await anext(aiter(call))).WhichOneof("event") for _ in range(1)] == ["accepted"]
        call.cancel()
        wanted = spec(resume=types_pb2.ResumePoint(generation_id=public(submit)))
        again = both.rig.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=wanted))
        both.ring.play(text_of(submit, 1, "b"))
        events = aiter(again)
        while (await anext(events)).WhichOneof("event") != "delta":
            continue
        asked = inference_pb2.CancelGenerationRequest(generation_id=public(submit))
        answer = await both.rig.stub.CancelGeneration(asked)
        assert answer.state == inference_pb2.GENERATION_STATE_CANCELLED
        assert public(submit).startswith(both.ring.cancels[-1]) and not both.rig.ring.cancels


async def test_a_model_that_leaves_gets_no_new_requests_and_ends_those_that_it_has() -> None:
    async with two() as both:
        call = both.rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(model="other")))
        submit = await both.ring.next_submit()
        both.ring.play(text_of(submit, 0, "a", first=True))
        both.lane.is_leaving = True
        with pytest.raises(grpc.aio.AioRpcError, match="this server serves 'toy'"):
            await both.rig.stub.Generate(unary_request(model="other"))
        both.lane.end(unloaded("other"))
        with pytest.raises(grpc.aio.AioRpcError, match="was unloaded") as ended:
            _ = [event async for event in call]
        assert ended.value.code() is grpc.StatusCode.ABORTED
        await both.lane.emptied(5.0)
        both.rig.gateway.close("m1")
        left = await both.rig.control.ListModels(control_pb2.ListModelsRequest())
        assert [one.id for one in left.models] == ["toy"]


async def test_what_is_open_is_limited_for_all_models_together() -> None:
    chosen = dataclasses.replace(SETTINGS, max_open_requests=1)
    async with running(chosen) as rig:
        ring = FakeRing()
        other = dataclasses.replace(chosen, model=dataclasses.replace(MODEL, id="other"))
        lane = ring.opened(rig.gateway, other, "m1")
        await ring.until(lambda: lane.is_serving)
        call = rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(model="other")))
        await ring.next_submit()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Generate(unary_request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()


async def test_load_and_operations_are_those_of_all_models() -> None:
    async with two() as both:
        wanted: list[Submit] = []
        both.ring.script = wanted.append
        call = both.rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(model="other")))
        await both.ring.until(lambda: wanted)
        load = (await both.rig.control.GetLoad(control_pb2.GetLoadRequest())).load
        assert (load.open_requests, [one.tenant for one in load.tenants]) == (1, ["default"])
        call.cancel()
        asked = control_pb2.ResizeCacheRequest(process="none", tokens=9)
        with pytest.raises(grpc.aio.AioRpcError, match=r"this service has d0, e0, g0, m1-d0, m1-e0, m1-t0, t0"):
            await both.rig.control.ResizeCache(asked).read()


async def test_a_tenant_reaches_the_models_that_its_file_names_and_knows_of_no_others(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    limits = '[tenants.few]\nmodels = ["ot*"]\n[tenants.none]\nmodels = []\n'
    keys = [entry(name, name, "generate") for name in ("few", "none", "all")]
    file.write_text(limits + "".join(keys))
    async with two(dataclasses.replace(SETTINGS, access_file=file)) as both:
        answering(both.rig.ring, "toy")
        answering(both.ring, "other")
        control = both.rig.control
        for key, names in (("few", ["other"]), ("none", []), ("all", ["other", "toy"])):
            found = await control.ListModels(control_pb2.ListModelsRequest(), metadata=bearer(key))
            assert [one.id for one in found.models] == names
            for name in ("toy", "other"):
                call = both.rig.stub.Generate(unary_request(model=name), metadata=bearer(key))
                if name in names:
                    assert (await call).model == name
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                shown = "'other'" if key == "few" else "none"
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                assert f"this server serves {shown}" in str(refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError, match="model '' is not known here"):
            await both.rig.stub.Generate(unary_request(), metadata=bearer("few"))
        with pytest.raises(grpc.aio.AioRpcError, match="'toy' is not known here"):
            await control.GetModel(control_pb2.GetModelRequest(model="toy"), metadata=bearer("few"))
