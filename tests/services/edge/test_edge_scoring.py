"""Scores of pairs over HTTP."""

from typing import Any

import pytest

from sluice_server.services.messages.work import Embed, PairPrompt
from tests.services.edge.edge_rig import edge
from tests.services.edge.test_edge_ranking import post
from tests.services.gateway.contract.test_gateway_classification import ONE, answer


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", ["ab"]),
        ("a", ["b", "c"], ["ab", "ac"]),
        (["a"], ["b", "c"], ["ab", "ac"]),
        (["a", "b"], ["c", "d"], ["ac", "bd"]),
    ],
)
async def test_one_text_with_each_or_as_many_of_both(
    path: str, first: object, second: object, pairs: list[str]
) -> None:
    async with edge(ONE) as rig:
        answer(rig, [[float(at)] for at in range(len(pairs))])
        found = (await post(rig, path, {"model": "toy", "text_1": first, "text_2": second})).json()
        work = rig.ring.submits[-1].work
        assert isinstance(work, Embed) and work.inputs == tuple(PairPrompt(*one) for one in pairs)
        assert [one["index"] for one in found["data"]] == list(range(len(pairs)))
        assert found["data"][0] == {"index": 0, "object": "score", "score": 0.5} and found["model"] == "toy"
        assert found["object"] == "list" and found["id"].startswith("score-") and found["created"] > 0
        assert found["usage"] == {"prompt_tokens": 4 * len(pairs), "total_tokens": 4 * len(pairs)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": [], "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a" * 8193, "text_2": ["b"] * 2048}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "", "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ({"text_1": "a", "text_2": "b", "made_up": 1}, "made_up"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2"),
    ],
)
async def test_what_is_not_right_is_named(body: dict[str, Any], param: str) -> None:
    async with edge(ONE) as rig:
        found = await post(rig, "/score", body)
        assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text
