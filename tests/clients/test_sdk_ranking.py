"""Classes, rankings and scores with both Python clients against a real gateway, whose ring the test plays."""

import asyncio
from collections.abc import Sequence

import pytest
import sluice
from sluice.ranking import classify_request, rerank_request, score_request
from sluice.v1 import inference_pb2

from tests.services.gateway.contract.test_gateway_classification import ONE, THREE, answer
from tests.services.gateway.fake_ring import running


async def test_both_clients_rank_and_score() -> None:
    async with running(ONE) as rig:
        answer(rig, [[0.0], [2.0]])
        async with sluice.AsyncClient(f"127.0.0.1:{rig.port}") as client:
            ranking = await client.rerank("q", ["a", "b"])
            scores = await client.score([("q", "a"), ("q", "b")])
        assert [one.index for one in ranking] == [1, 0] and len(ranking) == 2 and ranking[1].score == 0.5
        assert [*scores] == [ranking[1].score, ranking[0].score] and len(scores) == 2 and scores[0] == 0.5
        assert ranking.usage.prompt_tokens == scores.usage.prompt_tokens == 8

        def blocking() -> tuple[sluice.Ranking, sluice.Scores]:
            with sluice.Client(f"127.0.0.1:{rig.port}") as client:
                return client.rerank("q", ["a", "b"], top_n=1), client.score([("q", "a"), ("q", "b")])

        best, same = await asyncio.to_thread(blocking)
        assert [one.index for one in best] == [1] and [*same] == [*scores]


async def test_both_clients_classify() -> None:
    async with running(THREE) as rig:
        answer(rig, [[0.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
        async with sluice.AsyncClient(f"127.0.0.1:{rig.port}") as client:
            inputs: list[str | Sequence[int]] = ["a", [1, 2]]
            found = await client.classify(inputs)
        assert found.labels == ["x", "y", "z"] and found.label(0) == "y" and len(found) == 2
        assert found[1] == pytest.approx([1 / 3] * 3) and found.usage.prompt_tokens == 8

        def blocking() -> sluice.Classifications:
            with sluice.Client(f"127.0.0.1:{rig.port}") as client:
                return client.classify(["a", "b"], truncate="left")

        assert (await asyncio.to_thread(blocking)).response == found.response


def test_every_option_goes_into_the_request() -> None:
    full = {"model": "a", "revision": "b"}
    assert classify_request("p", {"model": "a", "revision": "b", "truncate": "right"}) == inference_pb2.ClassifyRequest(
        **full, truncate=inference_pb2.TRUNCATION_RIGHT, inputs=[inference_pb2.EmbedInput(text="p")]
    )
    assert rerank_request(
        "q", ["d"], {"model": "a", "revision": "b", "top_n": 3, "instruction": "i", "truncate": "left"}
    ) == inference_pb2.RerankRequest(
        **full, top_n=3, query="q", documents=["d"], instruction="i", truncate=inference_pb2.TRUNCATION_LEFT
    )
    pair = inference_pb2.TextPair(first="c", second="d")
    assert score_request(
        [("c", "d")], {"model": "a", "revision": "b", "instruction": "i", "truncate": "right"}
    ) == inference_pb2.ScoreRequest(**full, pairs=[pair], instruction="i", truncate=inference_pb2.TRUNCATION_RIGHT)


def test_one_text_is_no_list_of_documents() -> None:
    with pytest.raises(TypeError, match="documents is one text: give a list of texts"):
        rerank_request("q", "documents", {})
