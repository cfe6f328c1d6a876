"""A ring that returns with another revision, or with several: admission, open requests, and errors of clients."""

import dataclasses
from typing import Any

import grpc
from sluice.v1 import control_pb2

from sluice_server.services.gateway.settings import ModelInfo
from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.processes import Probe, Role
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import (
    MODEL,
    SETTINGS,
    FakeRing,
    Rig,
    generation,
    is_warm_up,
    running,
    stream_request,
    text_of,
    unary_request,
)

NEW = ModelInfo(id="toy", revision="r2", context_length=500, architecture="Toy")


def returns_with(rig: Rig, **of_roles: str) -> None:
    """Replaces all processes by new ones of that revision."""
    rig.ring.of_roles = {**{str(role): "r2" for role in Role}, **of_roles}
    rig.ring.epoch += 1


def holding(ring: FakeRing, *revisions: str) -> None:
    """Sets the revisions of this gateway's own files."""
    found = {one: (dataclasses.replace(NEW, revision=one), SETTINGS.limits) for one in revisions}
    ring.read_model = found.get


async def listed(rig: Rig) -> Any:  # noqa: ANN401 # untyped stubs
    return (await rig.control.ListModels(control_pb2.ListModelsRequest())).models[0]


async def test_open_requests_end_and_new_ones_are_of_the_new_revision() -> None:
    async with running() as rig:
        holding(rig.ring, "r2")
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        returns_with(rig)
        events, error = [], None
        try:
            events = [event async for event in call]
        except grpc.aio.AioRpcError as found:
            error = found
        assert events == [] and error is not None and error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "REVISION_CHANGED" in str(error.trailing_metadata())
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert len(rig.ring.submits) == 1 and rig.ring.cancels  # never sent again
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["b"]))
        assert (await rig.stub.Generate(unary_request())).revision == "r2"
        told = await listed(rig)
        assert (told.revision, told.context_length) == ("r2", 500)


async def test_the_same_revision_goes_on() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        returns_with(rig, tokenizer="r1", engine="r1", detokenizer="r1")
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        rig.ring.play(*generation(rig.ring.submits[-1], ["a"]))
        assert [event.WhichOneof("event") async for event in call][-1] == "finished"


async def test_no_request_is_let_in_while_revisions_differ() -> None:
    """Neither clients' nor the gateway's own requests are admitted; open ones are not sent again."""
    async with running() as rig:
        holding(rig.ring, "r2")
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        num = len(rig.ring.emitted)
        returns_with(rig, tokenizer="r1")
        await rig.ring.until(lambda: any(isinstance(one, Probe) and one.is_mixed for one in rig.ring.emitted))
        error, _ = await failure(rig.stub.Generate(unary_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not [one for one in rig.ring.emitted[num:] if isinstance(one, Submit)]
        returns_with(rig)  # the tokenizer has started again
        error, _ = await failure(call.read())
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        await rig.ring.until(lambda: rig.gateway.is_serving)
        num = len(rig.ring.emitted)
        await rig.ring.until(lambda: [one for one in rig.ring.emitted[num:] if isinstance(one, Probe)])
        assert not any(one.is_mixed for one in rig.ring.emitted[num:] if isinstance(one, Probe))


async def test_a_gateway_whose_own_files_are_others_lets_nothing_in() -> None:
    async with running() as rig:
        returns_with(rig)
        await rig.ring.until(lambda: any(isinstance(one, Probe) and one.is_mixed for one in rig.ring.emitted))
        assert not rig.gateway.is_serving and (await listed(rig)).revision == "r1"
        holding(rig.ring, "r2")  # they are replaced, too
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert (await listed(rig)).revision == "r2"


async def test_it_names_no_revision_before_the_ring_has() -> None:
    unnamed = dataclasses.replace(SETTINGS, model=dataclasses.replace(MODEL, revision="", label="mine"))
    async with running(unnamed, wait=False) as rig:
        holding(rig.ring, "r1")
        rig.ring.answers_probes = False
        assert (await listed(rig)).revision == ""
        for asked in ({}, {"revision": "r1"}, {"revision": ""}):
            error, _ = await failure(rig.stub.Generate(unary_request(**asked)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        rig.ring.answers_probes = True
        await rig.ring.until(lambda: rig.gateway.is_serving)
        assert [one.envelope.revision for one in rig.ring.emitted if isinstance(one, Submit) and is_warm_up(one)]
        assert (await listed(rig)).revision == "r1"


async def test_a_label_names_what_is_served() -> None:
    labelled = dataclasses.replace(SETTINGS, model=dataclasses.replace(MODEL, label="mine"))
    async with running(labelled) as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["b"]))
        for revision, code in (("mine", grpc.StatusCode.OK), ("other", grpc.StatusCode.NOT_FOUND)):
            call = rig.stub.Generate(unary_request(revision=revision))
            assert await call.code() is code
