"""Classify and Rerank at the gateway: what the ring is asked for, scores, order, and refusals by name."""

import dataclasses
import math
import struct
from collections.abc import Sequence

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.labels import Activation, LabelsConfig
from sluice_server.engine.request import Pooling
from sluice_server.services.gateway.contract.classification import activated, classification, ranking, scoring
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.details import Embedded, Timings
from sluice_server.services.messages.messages import Result
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Embed, PairPrompt, TextPrompt, Truncation
from tests.services.gateway.fake_ring import MODEL, SETTINGS, Rig, running, settings

TEXTS = [inference_pb2.EmbedInput(text=text) for text in ("a", "b")]


def serving(*names: str, activation: Activation = Activation.SOFTMAX) -> GatewaySettings:
    """A gateway of a model with these classes."""
    return settings(model=dataclasses.replace(MODEL, generates=False, labels=LabelsConfig(names, activation)))


ONE = serving("relevant", activation=Activation.SIGMOID)
THREE = serving("x", "y", "z")


def answer(rig: Rig, vectors: Sequence[Sequence[float]]) -> None:
    """Has the ring answer with these numbers of the head."""
    packed = tuple(struct.pack(f"<{len(one)}f", *one) for one in vectors)
    found = Embedded(packed, (4,) * len(packed), 0, Timings())
    rig.ring.script = lambda submit: rig.lane.handle(Result(submit.envelope, found))


async def test_the_classes_of_inputs() -> None:
    async with running(THREE) as rig:
        answer(rig, [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
        found = await rig.stub.Classify(inference_pb2.ClassifyRequest(inputs=TEXTS))
        assert list(found.labels) == ["x", "y", "z"] and found.activation == inference_pb2.CLASS_ACTIVATION_SOFTMAX
        total = sum(math.exp(at) for at in (1, 2, 3))
        assert list(found.results[0].scores) == pytest.approx([math.exp(at) / total for at in (1, 2, 3)])
        assert list(found.results[1].scores) == pytest.approx([1 / 3] * 3)
        assert found.usage.prompt_tokens == 8 and found.results[1].prompt_tokens == 4
        work = rig.ring.submits[-1].work
        assert isinstance(work, Embed) and work.options.pooling is Pooling.CLASSES
        assert work.inputs == (TextPrompt("a"), TextPrompt("b")) and not work.options.normalize


async def test_documents_by_falling_score() -> None:
    async with running(ONE) as rig:
        answer(rig, [[-1.0], [2.0], [0.0], [2.0]])
        request = inference_pb2.RerankRequest(query="q", documents=["a", "b", "c", "d"])
        found = await rig.stub.Rerank(request)
        assert [one.index for one in found.results] == [1, 3, 2, 0]
        assert found.results[0].score == pytest.approx(1 / (1 + math.exp(-2))) and found.results[2].score == 0.5
        work = rig.ring.submits[-1].work
        assert isinstance(work, Embed) and work.inputs[2] == PairPrompt("q", "c") and work.field == "documents"
        request.top_n = 2
        assert [one.index for one in (await rig.stub.Rerank(request)).results] == [1, 3]


async def test_the_scores_of_pairs_in_order() -> None:
    async with running(ONE) as rig:
        answer(rig, [[2.0], [0.0]])
        pairs = [inference_pb2.TextPair(first="a", second="b"), inference_pb2.TextPair(first="c", second="d")]
        found = await rig.stub.Score(inference_pb2.ScoreRequest(pairs=pairs))
        assert list(found.scores) == pytest.approx([1 / (1 + math.exp(-2)), 0.5]) and found.usage.prompt_tokens == 8
        assert (found.model, found.revision) == ("toy", "r1")
        work = rig.ring.submits[-1].work
        assert isinstance(work, Embed) and work.inputs == (PairPrompt("a", "b"), PairPrompt("c", "d"))
        assert work.field == "pairs" and work.options.pooling is Pooling.CLASSES
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            pairs[1].second = ""
            await rig.stub.Score(inference_pb2.ScoreRequest(pairs=pairs))
        assert (refused.value.details() or "").startswith("pairs[1].second: is empty")


def test_a_pair_that_is_too_long_is_refused_or_cut() -> None:
    pair = inference_pb2.TextPair(first="q", second="a")
    for asked, want in ((None, Truncation.NONE), (inference_pb2.TRUNCATION_LEFT, Truncation.LEFT)):
        ranked = ranking(inference_pb2.RerankRequest(query="q", documents=["a"], truncate=asked), 0, ONE).work
        scored = scoring(inference_pb2.ScoreRequest(pairs=[pair], truncate=asked), 0, ONE).work
        assert isinstance(ranked, Embed) and isinstance(scored, Embed)
        assert ranked.truncation is want and scored.truncation is want
    words = LabelsConfig(("relevant",), Activation.SIGMOID, (3, 4))
    chosen = settings(model=dataclasses.replace(MODEL, labels=words))
    with pytest.raises(ServiceError, match="whose chat template would be cut: send shorter texts"):
        scoring(inference_pb2.ScoreRequest(pairs=[pair], truncate=inference_pb2.TRUNCATION_RIGHT), 0, chosen)


@pytest.mark.parametrize("instruction", ["", "Judge."])
async def test_a_model_that_answers_with_a_word_reads_turns(instruction: str) -> None:
    labels = LabelsConfig(("relevant",), Activation.SIGMOID, (3, 4))
    chosen = settings(model=dataclasses.replace(MODEL, labels=labels, instruction=instruction))
    async with running(chosen) as rig:
        answer(rig, [[0.0], [2.0]])
        found = await rig.stub.Rerank(inference_pb2.RerankRequest(query="q", documents=["a", "b"]))
        assert [one.index for one in found.results] == [1, 0]
        work = rig.ring.submits[-1].work
        first = [ChatMessage("system", instruction)] if instruction else []
        pair = ChatMessage("query", "q"), ChatMessage("document", "a")
        assert isinstance(work, Embed) and work.inputs[0] == ChatPrompt((*first, *pair))
        (model,) = (await rig.control.ListModels(control_pb2.ListModelsRequest())).models
        assert control_pb2.MODEL_TASK_RERANK in model.tasks and control_pb2.MODEL_TASK_CLASSIFY not in model.tasks
    with pytest.raises(ServiceError, match="which reads a query and a document: use Rerank"):
        classification(inference_pb2.ClassifyRequest(inputs=TEXTS), 0, chosen)


@pytest.mark.parametrize("instruction", ["", "Judge.", "x" * 8192])
def test_an_instruction_is_in_place_of_the_models(instruction: str) -> None:
    labels = LabelsConfig(("relevant",), Activation.SIGMOID, (3, 4))
    chosen = settings(model=dataclasses.replace(MODEL, labels=labels, instruction="the model's"))
    ranked = inference_pb2.RerankRequest(query="q", documents=["a"], instruction=instruction)
    pair = inference_pb2.TextPair(first="q", second="a")
    scored = inference_pb2.ScoreRequest(pairs=[pair], instruction=instruction)
    first = (ChatMessage("system", instruction),) if instruction else ()
    want = ChatPrompt((*first, ChatMessage("query", "q"), ChatMessage("document", "a")))
    for made in (ranking(ranked, 0, chosen), scoring(scored, 0, chosen)):
        assert isinstance(made.work, Embed) and made.work.inputs == (want,)
    ranked.instruction = scored.instruction = "x" * 8193
    with pytest.raises(ServiceError, match="instruction: has 8193 bytes; at most 8192"):
        ranking(ranked, 0, chosen)
    with pytest.raises(ServiceError, match="instruction: has 8193 bytes; at most 8192"):
        scoring(scored, 0, chosen)
    with pytest.raises(ServiceError, match="instruction is not supported with this model"):
        ranking(ranked, 0, ONE)


@pytest.mark.parametrize(
    ("activation", "numbers", "want"),
    [
        (Activation.NONE, [3.0, -7.0], [3.0, -7.0]),
        (Activation.SIGMOID, [1000.0, -1000.0, 0.0], [1.0, 0.0, 0.5]),
        (Activation.SOFTMAX, [1000.0, 0.0], [1.0, 0.0]),
    ],
)
def test_scores_of_numbers(activation: Activation, numbers: list[float], want: list[float]) -> None:
    assert activated(numbers, activation) == pytest.approx(want)


def test_models_that_cannot_are_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="Classify is not supported with this model, which has no classification"):
        classification(inference_pb2.ClassifyRequest(inputs=TEXTS), 0, SETTINGS)
    request = inference_pb2.RerankRequest(query="q", documents=["a"])
    for chosen, told in ((SETTINGS, "which has no classification head"), (THREE, "whose head has 3 classes")):
        with pytest.raises(ServiceError, match=f"Rerank is not supported with this model, {told}"):
            ranking(request, 0, chosen)
        with pytest.raises(ServiceError, match=f"Score is not supported with this model, {told}"):
            scoring(inference_pb2.ScoreRequest(), 0, chosen)


async def test_the_model_says_it() -> None:
    embed, classify, rerank = (
        control_pb2.MODEL_TASK_EMBED,
        control_pb2.MODEL_TASK_CLASSIFY,
        control_pb2.MODEL_TASK_RERANK,
    )
    for chosen, tasks in ((THREE, [embed, classify]), (ONE, [embed, classify, rerank])):
        async with running(chosen) as rig:
            (model,) = (await rig.control.ListModels(control_pb2.ListModelsRequest())).models
            assert list(model.tasks) == tasks


async def test_an_error_of_the_ring_names_the_document() -> None:
    async with running(ONE) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Rerank(inference_pb2.RerankRequest(query="q", documents=["a", ""]))
        assert (refused.value.details() or "").startswith("documents[1]: is empty")
