"""Embed at the gateway: what the ring is asked for, the answer in every encoding, and refusals by name."""

import dataclasses
import struct
from collections.abc import Callable

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Pooling
from sluice_server.services.checkpoint.pooling_files import PoolingFiles
from sluice_server.services.gateway.contract.embedding import embedding
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.details import Embedded, Timings
from sluice_server.services.messages.messages import Result, Submit
from sluice_server.services.messages.work import Embed, TextPrompt, TokenPrompt, Truncation, VectorEncoding, pack_ids
from tests.services.gateway.fake_ring import MODEL, SETTINGS, Rig, running, settings, unary_request

HEADLESS = settings(model=dataclasses.replace(MODEL, generates=False))
VECTORS = [[0.5, -1.0, 2.0], [3.0, 0.0, -4.0]]


def serving(**files: object) -> GatewaySettings:
    """A gateway of a model whose files say that of its vectors."""
    return settings(model=dataclasses.replace(MODEL, vectors=PoolingFiles(**files)))  # type: ignore[arg-type] # fields


def request(**fields: object) -> inference_pb2.EmbedRequest:
    inputs = [inference_pb2.EmbedInput(text="one"), inference_pb2.EmbedInput(text="two")]
    return inference_pb2.EmbedRequest(**{"inputs": inputs, **fields})  # type: ignore[arg-type] # any field


def work_of(asked: inference_pb2.EmbedRequest, chosen: GatewaySettings = SETTINGS) -> Embed:
    found = embedding(asked, 3, chosen).work
    assert isinstance(found, Embed)
    return found


def test_absent_fields_take_the_models_values() -> None:
    work = work_of(request())
    assert work.options.pooling is Pooling.LAST and work.options.normalize and work.options.dimensions == 8
    assert work.options.encoding is VectorEncoding.FLOAT and work.truncation is Truncation.NONE
    assert work.scheduling.priority == 3
    other = work_of(request(), serving(pooling=Pooling.MEAN, normalize=False))
    assert other.options.pooling is Pooling.MEAN and not other.options.normalize


def test_what_is_asked_for_goes_into_the_ring() -> None:
    ids = inference_pb2.EmbedInput()
    ids.token_ids.ids.extend([4, 5])
    asked = request(
        inputs=[ids, inference_pb2.EmbedInput(text="x")],
        pooling=inference_pb2.POOLING_MEAN,
        normalize=False,
        dimensions=3,
        encoding=inference_pb2.VECTOR_ENCODING_BINARY,
        truncate=inference_pb2.TRUNCATION_LEFT,
    )
    work = work_of(asked)
    assert work.inputs == (TokenPrompt(pack_ids([4, 5])), TextPrompt("x"))
    assert (work.options.pooling, work.options.normalize, work.options.dimensions) == (Pooling.MEAN, False, 3)
    assert work.options.encoding is VectorEncoding.BINARY and work.truncation is Truncation.LEFT
    assert work_of(request(instruction="q: ")).instruction == "q: "


@pytest.mark.parametrize(
    ("asked", "chosen", "told"),
    [
        (request(), serving(refusal="modules.json names a module of type 'Dense'"), "Embed is not supported with this"),
        (request(pooling=inference_pb2.POOLING_FIRST), SETTINGS, "pooling FIRST is not supported by this model"),
        (request(adapter="a"), SETTINGS, "adapter is not supported"),
        (
            request(instruction="a"),
            serving(pooling=Pooling.MEAN, pools_instruction=False),
            "instruction is not supported by this model",
        ),
        (request(dimensions=8), settings(max_send_bytes=100), "2 vectors have 128 bytes; an answer has at most 100"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    asked: inference_pb2.EmbedRequest, chosen: GatewaySettings, told: str
) -> None:
    with pytest.raises(ServiceError, match=told):
        embedding(asked, 0, chosen)


def answering(rig: Rig, vectors: list[bytes]) -> Callable[[Submit], None]:
    """A ring that answers with these vectors."""
    found = Embedded(tuple(vectors), tuple(range(4, 4 + len(vectors))), 2, Timings(queue_s=0.5))
    return lambda submit: rig.lane.handle(Result(submit.envelope, found))


async def test_the_answer_echoes_what_was_done() -> None:
    async with running() as rig:
        rig.ring.script = answering(rig, [struct.pack("<3f", *vector) for vector in VECTORS])
        found = await rig.stub.Embed(request(dimensions=3))
        assert [list(one.values) for one in found.embeddings] == VECTORS
        assert [one.prompt_tokens for one in found.embeddings] == [4, 5] and not found.embeddings[0].data
        assert (found.pooling, found.normalized, found.dimensions) == (inference_pb2.POOLING_LAST, True, 3)
        assert found.encoding == inference_pb2.VECTOR_ENCODING_FLOAT
        assert (found.usage.prompt_tokens, found.usage.cached_tokens, found.usage.completion_tokens) == (9, 2, 0)
        assert (found.model, found.revision) == ("toy", "r1")
        assert rig.lane.manager.num_open == 0 and not rig.ring.cancels


@pytest.mark.parametrize("encoding", [inference_pb2.VECTOR_ENCODING_BFLOAT16, inference_pb2.VECTOR_ENCODING_BINARY])
async def test_other_encodings_are_bytes(encoding: "inference_pb2.VectorEncoding.ValueType") -> None:
    async with running() as rig:
        rig.ring.script = answering(rig, [b"ab", b"cd"])
        found = await rig.stub.Embed(request(encoding=encoding))
        assert [one.data for one in found.embeddings] == [b"ab", b"cd"] and not found.embeddings[0].values
        assert found.encoding == encoding


async def test_many_vectors_are_answered_in_order() -> None:
    async with running(settings(model=dataclasses.replace(MODEL, vector_width=1024))) as rig:
        vectors = [struct.pack("<1024f", *([at] * 1024)) for at in range(100)]
        rig.ring.script = answering(rig, vectors)
        found = await rig.stub.Embed(request(inputs=[inference_pb2.EmbedInput(text="a")] * 100))
        assert [one.values[1023] for one in found.embeddings] == list(range(100))


async def test_a_client_that_leaves_cancels_its_request() -> None:
    async with running() as rig:
        call = rig.stub.Embed(request())
        await rig.ring.next_submit()
        call.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)
        assert rig.lane.manager.num_open == 0


async def test_a_lost_ring_gets_the_same_work_again() -> None:
    async with running() as rig:
        call = rig.stub.Embed(request())
        first = await rig.ring.next_submit()
        open_request = rig.lane.manager.requests.get(first.envelope.request_id)
        assert open_request is not None
        rig.ring.script = answering(rig, [struct.pack("<f", 1.0)] * 2)
        rig.lane.manager.resubmit(open_request)
        assert len((await call).embeddings) == 2
        again = rig.ring.submits[-1]
        assert again.work == first.work and again.envelope.attempt == first.envelope.attempt + 1


async def test_the_model_says_what_it_can_be_asked_for() -> None:
    for chosen, tasks, width in (
        (SETTINGS, [control_pb2.MODEL_TASK_GENERATE, control_pb2.MODEL_TASK_EMBED], 8),
        (serving(refusal="no"), [control_pb2.MODEL_TASK_GENERATE], 0),
        (HEADLESS, [control_pb2.MODEL_TASK_EMBED], 8),
    ):
        async with running(chosen) as rig:
            (model,) = (await rig.control.ListModels(control_pb2.ListModelsRequest())).models
            assert list(model.tasks) == tasks and model.embedding_width == width
            info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
            assert (control_pb2.FEATURE_EMBED in info.features) == (width > 0)


def test_the_first_token_is_for_encoders() -> None:
    limits = dataclasses.replace(SETTINGS.limits, poolings=(Pooling.LAST, Pooling.MEAN, Pooling.FIRST))
    encoder = dataclasses.replace(SETTINGS, limits=limits)
    assert work_of(request(pooling=inference_pb2.POOLING_FIRST), encoder).options.pooling is Pooling.FIRST


async def test_a_model_without_a_head_generates_nothing() -> None:
    async with running(HEADLESS) as rig:
        assert all(isinstance(one.work, Embed) for one in rig.ring.emitted if isinstance(one, Submit)), "of the warm-up"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Generate(unary_request())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Generate is not supported with this model" in (refused.value.details() or "")
        rig.ring.script = answering(rig, [struct.pack("<f", 1.0)] * 2)
        assert len((await rig.stub.Embed(request())).embeddings) == 2


async def test_a_refusal_is_a_status_that_names_the_field() -> None:
    async with running() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Embed(request(dimensions=9))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "dimensions: 9 is not in [1, 8]"
