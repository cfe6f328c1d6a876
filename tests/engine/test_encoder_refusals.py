"""What is refused of encoders, by name: generations, settings, files that name what is not built."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from tests.engine.test_encoders import WIDE, make_engine
from tests.oracle.encoders import HIDDEN, RandomEncoder, make_encoder


def test_generation_and_unknown_poolings_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    engine = make_engine(tmp_path)
    with pytest.raises(ServiceError, match="Generate is not supported with this model"):
        engine.add(EngineRequest("tokens", (1, 2), SamplingParams(max_tokens=2)))
    with pytest.raises(ServiceError, match="pooling CLASSES is not supported by this model, which has no"):
        engine.add(EngineRequest("classes", (1, 2), SamplingParams(), pooling=Pooling.CLASSES))
    with pytest.raises(ServiceError, match="has 2 tokens, of which 3 are of its first text"):
        engine.add(EngineRequest("pair", (1, 2), SamplingParams(), pooling=Pooling.MEAN, num_first=3))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "int8"}, "--quantization: weights of an encoder are not rounded"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype: an encoder has no KV cache"),
        ({"kv_cache_tokens": 64}, "--kv-cache-tokens: an encoder has no KV cache"),
        ({"speculation": "ngram"}, "--speculation: an encoder generates nothing"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: an encoder is computed by one rank"),
        ({"device": "cuda"}, "--device: cuda is not supported for an encoder: take cpu"),
    ],
)
def test_settings_that_an_encoder_has_no_use_for_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    make_encoder(tmp_path, "Bert")
    with pytest.raises(ServiceError, match=said):
        make_engine(tmp_path, dataclasses.replace(WIDE, **changes))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not supported; supported are gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, which does not divide hidden_size, 48"),
        (
            {"architectures": ["NomicBertModel"]},
            "architecture 'NomicBertModel' is not supported; supported are BertFor",
        ),
        ({"architectures": ["DebertaV2ForSequenceClassification"]}, "is not supported; supported are"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    make_encoder(tmp_path, "Bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ServiceError, match=said):
        read_served(tmp_path)


def test_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    oracle: RandomEncoder = make_encoder(tmp_path, "Bert")
    with torch.no_grad():
        oracle.model.base_model.encoder.layer[0].output.LayerNorm.weight.fill_(3e38)  # type: ignore[union-attr,index] # theirs
    oracle.model.save_pretrained(tmp_path)
    with pytest.raises(ServiceError, match="the first tokens have no finite hidden states"):
        make_engine(tmp_path)
    assert read_served(tmp_path).hidden_size == HIDDEN
