"""Classes and rankings over HTTP."""

import math
from typing import Any

import httpx2
import pytest

from sluice_server.services.messages.work import Embed, Truncation
from tests.services.edge.edge_rig import EdgeRig, edge
from tests.services.gateway.contract.test_gateway_classification import ONE, THREE, answer

DOCUMENTS = ["a", "b", "c"]


async def post(rig: EdgeRig, path: str, body: dict[str, Any]) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(rig.url + path, json=body)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_documents_by_falling_score(path: str) -> None:
    async with edge(ONE) as rig:
        answer(rig, [[0.0], [2.0], [1.0]])
        found = (await post(rig, path, {"model": "toy", "query": "q", "documents": DOCUMENTS, "top_n": 2})).json()
        assert [one["index"] for one in found["results"]] == [1, 2] and found["model"] == "toy"
        assert found["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-2)))
        assert found["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
        body = {"query": "q", "documents": ["a", {"text": "b"}, "c"], "return_documents": True}
        told = (await post(rig, path, body)).json()["results"]
        assert [one["document"]["text"] for one in told] == ["b", "c", "a"]


async def test_pairs_that_are_too_long_may_be_cut() -> None:
    cut = {"truncate_prompt_tokens": -1}
    async with edge(ONE) as rig:
        answer(rig, [[0.0]])
        await post(rig, "/rerank", {"query": "q", "documents": ["a"], **cut})
        await post(rig, "/score", {"text_1": "q", "text_2": "a", **cut, "truncation_side": "left"})
        found = [one.work.truncation for one in rig.ring.submits if isinstance(one.work, Embed)]
        assert found == [Truncation.RIGHT, Truncation.LEFT]


async def test_the_classes_of_texts() -> None:
    async with edge(THREE) as rig:
        answer(rig, [[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
        found = (await post(rig, "/classify", {"input": ["a", "b"]})).json()
        assert [one["label"] for one in found["data"]] == ["y", "x"]
        assert found["data"][0]["num_classes"] == 3 and sum(found["data"][0]["probs"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "made_up": 1}, "made_up"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "x"}, "instruction"),
        ("/score", {"text_1": "q", "text_2": "a", "instruction": "x"}, "instruction"),
        ("/score", {"text_1": "q", "text_2": "a", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "q", "documents": ["a"], "truncation_side": "left"}, "truncation_side"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"input": ["a"], "made_up": 1}, "made_up"),
    ],
)
async def test_what_is_not_right_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with edge(ONE) as rig:
        found = await post(rig, path, body)
        assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text
