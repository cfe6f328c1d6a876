"""Vectors with both Python clients against a real gateway, whose ring the test plays."""

import asyncio
import struct
from collections.abc import Sequence

import pytest
import sluice
from sluice.embeddings import embed_request
from sluice.v1 import inference_pb2

from sluice_server.services.messages.details import Embedded, Timings
from sluice_server.services.messages.messages import Result, Submit
from sluice_server.services.messages.work import Embed
from tests.services.gateway.fake_ring import Rig, running


def script(rig: Rig, submit: Submit) -> None:
    """Answers each input with a vector of its index."""
    assert isinstance(submit.work, Embed)
    num = len(submit.work.inputs)
    vectors = tuple(struct.pack("<2f", at, submit.work.options.dimensions) for at in range(num))
    rig.lane.handle(Result(submit.envelope, Embedded(vectors, (3,) * num, 1, Timings())))


async def test_both_clients_get_the_vectors_in_order() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: script(rig, submit)
        async with sluice.AsyncClient(f"127.0.0.1:{rig.port}") as client:
            inputs: list[str | Sequence[int]] = ["a", [1, 2], "c"]
            found = await client.embed(inputs, dimensions=2)
        assert [found[at] for at in range(len(found))] == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]
        assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (9, 1)
        assert found.response.pooling == inference_pb2.POOLING_LAST

        def blocking() -> sluice.Embeddings:
            with sluice.Client(f"127.0.0.1:{rig.port}") as client:
                return client.embed("a", normalize=False)

        assert (await asyncio.to_thread(blocking))[0] == [0.0, 8.0]


def test_every_option_goes_into_the_request() -> None:
    options = {"pooling": "mean", "truncate": "left"}
    for name, kind in sluice.EmbedOptions.__annotations__.items():
        value = options.get(name, {int: 1, str: "a", bool: True}.get(kind))
        assert embed_request("p", {name: value}) != embed_request("p", {}), name  # type: ignore[misc] # its own type


def test_inputs_are_one_or_several() -> None:
    assert [one.text for one in embed_request("a", {}).inputs] == ["a"]
    assert [list(one.token_ids.ids) for one in embed_request([1, 2], {}).inputs] == [[1, 2]]
    assert [list(one.token_ids.ids) for one in embed_request([[1], [2, 3]], {}).inputs] == [[1], [2, 3]]
    with pytest.raises(TypeError, match="mixes token ids with texts"):
        embed_request(["a", 1], {})  # type: ignore[arg-type] # the mistake
