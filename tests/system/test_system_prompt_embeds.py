"""Prompt embeddings through real processes: the model's own give the tokens of its ids, also after a loss."""

from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.torch import load_file
from sluice.v1 import inference_pb2, types_pb2

from tests.system.service import generate, serve, spec

DEMO = Path(__file__).parents[2] / "demo" / "target" / "model.safetensors"
IDS = [*range(200, 275)]


def embedded(ids: list[int], following: list[int], num: int, **sampling: float) -> types_pb2.GenerationSpec:
    """A request with the model's own embeddings of `ids`, ahead of the ids `following`."""
    rows = load_file(DEMO)["model.embed_tokens.weight"][ids].float().numpy().astype("<f4")
    wanted = spec(following, num, **sampling)
    if not following:
        wanted.ClearField("token_ids")
    values = types_pb2.PromptEmbeds(values=rows.tobytes(), dtype=types_pb2.EMBEDS_TYPE_FLOAT32, num_tokens=len(ids))
    wanted.prompt_embeds.CopyFrom(values)
    return wanted


@pytest.mark.long
def test_the_models_own_embeddings_give_the_tokens_of_its_ids() -> None:
    with serve("--enable-prompt-embeds", "--dtype", "float32") as service, service.stub() as stub:
        expected = generate(stub, spec(IDS, 30)).text
        for num in (len(IDS), 70, 1):
            first, again = (
                stub.Generate(inference_pb2.GenerateRequest(spec=embedded(IDS[:num], IDS[num:], 30)), timeout=60)
                for _ in range(2)
            )
            assert first.outputs[0].text == again.outputs[0].text == expected
            assert first.usage.prompt_tokens == len(IDS)
            assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 64)
        bad = embedded(IDS, [], 30)
        bad.prompt_embeds.values = np.full(75 * 256, np.nan, dtype="<f4").tobytes()
        with pytest.raises(grpc.RpcError, match="not finite") as caught:
            generate(stub, bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        wanted = embedded(IDS, [], 400, temperature=1.0, seed=7)
        whole = generate(stub, wanted).text
        stream = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120)
        text = ""
        for event in stream:
            if event.HasField("delta"):
                if not text:
                    service.children()["engine-0"].kill()
                text += event.delta.text
        assert text == whole
