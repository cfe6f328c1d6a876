"""Vectors through real processes: gRPC and HTTP give the same, beside generations, up to the whole context."""

import concurrent.futures

import openai
import pytest
import sluice

from tests.system.service import generate, serve, spec
from tests.system.test_system_edge import edge

TEXTS = ["def add(a, b):\n", "import os", "class Stack:\n    pass", "x"]


def test_vectors_are_the_same_by_every_way_and_beside_generations() -> None:
    with serve("--model", "demo", "--dtype", "float32") as service, edge("--address", service.address) as url:
        with service.stub() as stub, concurrent.futures.ThreadPoolExecutor(4) as pool:
            alone = generate(stub, spec(TEXTS[0], 60)).text
            beside = [pool.submit(generate, stub, spec(TEXTS[0], 60)) for _ in range(3)]
            with sluice.Client(service.address) as client:
                found = client.embed(TEXTS * 40)
                assert [one.result().text for one in beside] == [alone] * 3
                longest = client.models()[0].context_length
                whole = client.embed([[5] * longest, [5]], pooling="mean")
                assert [one.prompt_tokens for one in whole.response.embeddings] == [longest, 1]
                with pytest.raises(sluice.InvalidArgument, match=rf"inputs\[1\] has {longest + 1} tokens"):
                    client.embed([[5], [5] * (longest + 1)])
                with pytest.raises(sluice.InvalidArgument, match=r"inputs\[1\]"):
                    client.embed(["a", "b " * longest])
        first = [found[at] for at in range(len(TEXTS))]
        for at in range(len(found)):
            assert found[at] == pytest.approx(first[at % len(TEXTS)], abs=1e-4)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as web:
            name = next(iter(web.models.list())).id
            told = web.embeddings.create(model=name, input=TEXTS)
            assert told.usage.prompt_tokens == sum(one.prompt_tokens for one in found.response.embeddings[: len(TEXTS)])
            for one, want in zip(told.data, first, strict=True):
                assert one.embedding == pytest.approx(want, abs=1e-4)
