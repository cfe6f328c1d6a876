"""A client continues a generation whose gateway is gone from the tokens it has received."""

import dataclasses
from typing import Any

import grpc
import msgspec
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.calls.test_resume import told
from tests.services.gateway.fake_ring import MODEL, Rig, running, settings, text_of

GONE = "f" * 32 + ".gone"


def go_on(rig: Rig, after_seq: int = 3, **fields: Any) -> Any:  # noqa: ANN401 # of a spec; a call
    outputs = fields.pop("outputs", [{"output_index": 0, "token_ids": [7, 8]}])
    point = types_pb2.ResumePoint(generation_id=GONE, after_seq=after_seq, outputs=outputs)
    whole = {"text": "hello", "revision": "r1", "sampling": {"seed": 5}, **fields}
    asked = types_pb2.GenerationSpec(resume=point, **whole)
    return rig.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=asked))


async def test_it_goes_on_behind_the_ids_and_the_number_given() -> None:
    async with running() as rig:
        call = go_on(rig)
        submit = await rig.ring.next_submit()
        assert submit.resume == (pack_ids([7, 8]),)
        rig.ring.play(text_of(submit, 2, "c", first=True), text_of(submit, 3, "d", last=True))
        events = [event async for event in call]
        assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "output_finished", "finished"]
        assert (events[1].delta.seq, events[1].delta.text, events[-1].finished.last_seq) == (4, "cd", 4)
        assert events[-1].finished.usage.completion_tokens == 4
        assert events[0].accepted.generation_id != GONE and events[0].accepted.params.sampling.seed == 5


async def test_a_detached_continuation_is_resumed_itself() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 2, "c", first=True, last=True))
        scheduling = {"on_disconnect": types_pb2.DISCONNECT_ACTION_DETACH}
        events = [event async for event in go_on(rig, scheduling=scheduling)]
        point = types_pb2.ResumePoint(generation_id=events[0].accepted.generation_id, after_seq=3)
        request = inference_pb2.ResumeGenerateRequest(spec=types_pb2.GenerationSpec(resume=point))
        kinds = [kind for kind, _ in await told(rig.stub.ResumeGenerate(request))]
        assert kinds == ["accepted", "delta", "output_finished", "finished"]


async def test_nothing_received_is_a_beginning() -> None:
    async with running() as rig:
        call = go_on(rig, after_seq=0, outputs=[])
        submit = await rig.ring.next_submit()
        assert submit.resume == ()
        call.cancel()


@pytest.mark.parametrize("on_disconnect", ["DISCONNECT_ACTION_CANCEL", "DISCONNECT_ACTION_DETACH"])
async def test_a_search_is_computed_again_and_what_its_client_has_is_left_out(on_disconnect: str) -> None:
    async with running() as rig:
        received = [{"output_index": 0, "token_ids": [0]}]
        sampling = {"seed": 5, "n": 2, "best_of": 3}
        call = go_on(rig, 1, outputs=received, sampling=sampling, scheduling={"on_disconnect": on_disconnect})
        submit = await rig.ring.next_submit()
        assert submit.resume == ()
        whole = text_of(submit, 0, "a", first=True, last=True)
        rig.ring.play(whole, msgspec.structs.replace(whole, output_index=1))
        events = [event async for event in call]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["accepted", "output_finished", "delta", "output_finished", "finished"]
        assert (events[2].delta.seq, events[2].delta.output_index, events[2].delta.text) == (2, 1, "a")
        assert events[-1].finished.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "other"}, "model"),
        ({"sampling": {}}, "seed"),
        ({"credit_window": 1}, "credit_window"),
        ({"outputs": [{"output_index": 1, "token_ids": [1]}]}, "resume.outputs[0].output_index"),
        ({"outputs": [{"output_index": 0}, {"output_index": 0}]}, "resume.outputs[1].output_index"),
        ({"outputs": [{"token_ids": [100]}]}, "resume.outputs[0].token_ids[0]"),
    ],
)
async def test_what_cannot_go_on(fields: dict[str, Any], field: str) -> None:
    async with running() as rig:
        error, _ = await failure(go_on(rig, **fields).read())
        assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert (error.details() or "").startswith(field) and rig.ring.submits == []


async def test_the_revision_it_began_on_is_gone() -> None:
    async with running(settings(model=dataclasses.replace(MODEL, label="mine"))) as rig:
        for revision in ("r0", "mine"):  # a label may have named others before
            error, _ = await failure(go_on(rig, revision=revision).read())
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and rig.ring.submits == []
            assert "REVISION_CHANGED" in str(error.trailing_metadata())
