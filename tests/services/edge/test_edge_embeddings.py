"""Vectors over HTTP, with OpenAI's own client: both encodings, forms of input, what is refused."""

import base64
import struct
from typing import Any

import httpx2
import openai
import pytest

from sluice_server.engine.request import Pooling
from sluice_server.services.messages.details import Embedded, Timings
from sluice_server.services.messages.messages import Result, Submit
from sluice_server.services.messages.work import Embed, TextPrompt, TokenPrompt, Truncation, pack_ids
from tests.services.edge.edge_rig import EdgeRig, edge

VECTORS = [[0.5, -1.0, 2.0], [3.0, 0.1, -4.0]]


def answering(rig: EdgeRig, vectors: list[list[float]] = VECTORS) -> list[Embed]:
    """Has the ring answer with as many of the vectors as there are inputs, and lists what it was asked."""
    asked: list[Embed] = []

    def script(submit: Submit) -> None:
        assert isinstance(submit.work, Embed)
        asked.append(submit.work)
        packed = [struct.pack(f"<{len(one)}f", *one) for one in vectors[: len(submit.work.inputs)]]
        value = Embedded(tuple(packed), (4,) * len(packed), 0, Timings())
        rig.lane.handle(Result(submit.envelope, value))

    rig.ring.script = script
    return asked


async def post(rig: EdgeRig, body: dict[str, Any]) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(f"{rig.url}/v1/embeddings", json=body)


async def test_openais_client_gets_the_vectors_in_both_encodings() -> None:
    async with edge() as rig:
        asked = answering(rig)
        for encoding in ("float", "base64", openai.omit):  # its own default is base64, which it decodes
            found = await rig.client.embeddings.create(
                model="toy", input=["a", "b"], dimensions=3, user="u", encoding_format=encoding
            )
            vectors = [
                list(struct.unpack("<3f", base64.b64decode(one.embedding)))
                if isinstance(one.embedding, str)
                else one.embedding
                for one in found.data
            ]
            assert [one.index for one in found.data] == [0, 1] and found.model == "toy"
            assert vectors == [pytest.approx(one) for one in VECTORS]
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (8, 8)
        assert all(work.options.dimensions == 3 and work.options.pooling is Pooling.LAST for work in asked)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt(pack_ids([1, 2])),)),
        ([[1, 2], [3]], (TokenPrompt(pack_ids([1, 2])), TokenPrompt(pack_ids([3])))),
    ],
)
async def test_inputs_come_in_four_forms(given: object, want: tuple[object, ...]) -> None:
    async with edge() as rig:
        asked = answering(rig)
        assert len((await post(rig, {"input": given})).json()["data"]) == len(want)
        assert asked[0].inputs == want


async def test_further_fields_reach_the_service() -> None:
    async with edge() as rig:
        asked = answering(rig)
        body = {"input": "a", "normalize": False, "pooling": "mean", "instruction": "q: ", "add_special_tokens": True}
        await post(rig, body)
        await post(rig, {"input": "a", "truncate_prompt_tokens": -1})
        await post(rig, {"input": "a", "truncate_prompt_tokens": -1, "truncation_side": "left"})
        first, *cut = asked
        assert (first.options.normalize, first.options.pooling, first.instruction) == (False, Pooling.MEAN, "q: ")
        assert [first.truncation, *(one.truncation for one in cut)] == list(
            (Truncation.NONE, Truncation.RIGHT, Truncation.LEFT)
        )


async def test_many_vectors_are_written_in_order() -> None:
    async with edge() as rig:
        answering(rig, [[float(at)] * 8 for at in range(2048)])
        found = (await post(rig, {"input": ["a"] * 2048})).json()
        assert [one["embedding"][7] for one in found["data"]] == list(range(2048))
        assert [one["index"] for one in found["data"]] == list(range(2048))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [-1]}, "input"),
        ({"input": [[1], [1 << 32]]}, "input[1]"),
        ({"input": ""}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "a", "made_up": 1}, "made_up"),
    ],
)
async def test_what_is_not_right_is_named(body: dict[str, Any], param: str | None) -> None:
    async with edge() as rig:
        answering(rig)
        found = await post(rig, body)
        assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text
