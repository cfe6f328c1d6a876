"""Classification heads against `transformers`, with chunks, batches, preemption, and vectors and means beside."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.labels import Activation, LabelsConfig
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from tests.engine.test_engine_oracle import ROOMY, TIGHT, make_engine, some_prompts
from tests.engine.test_pooling import vector

CHUNKED = dataclasses.replace(ROOMY, max_num_batched_tokens=7)
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 88,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
POOLINGS = (Pooling.LAST, Pooling.MEAN, Pooling.CLASSES)
CLASSES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3": lambda: (transformers.Qwen3Config, transformers.Qwen3ForSequenceClassification),
    "llama": lambda: (transformers.LlamaConfig, transformers.LlamaForSequenceClassification),
}
VOCAB = 97


def make(
    directory: Path,
    name: str,
    num_labels: int,
    vocab: int = VOCAB,
    **fields: Any,  # noqa: ANN401 # of the config's types
) -> "transformers.PreTrainedModel":
    """Writes a random classifier and returns it."""
    config_class, model_class = CLASSES[name]()
    config = config_class(
        vocab_size=vocab,
        **TINY,
        num_labels=num_labels,
        pad_token_id=None,
        **fields,
    )
    torch.manual_seed(5)
    model = model_class(config)
    assert isinstance(model, transformers.PreTrainedModel)
    model.train(False)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("config", [ROOMY, CHUNKED, TIGHT], ids=["roomy", "chunked", "tight"])
@pytest.mark.parametrize(("name", "num_labels"), [("qwen3", 1), ("llama", 3)])
def test_numbers_are_the_models_own(tmp_path: Path, name: str, num_labels: int, config: EngineConfig) -> None:
    model = make(tmp_path, name, num_labels)
    prompts = some_prompts(VOCAB, 9)
    with torch.inference_mode():
        want = {one: model(torch.tensor([ids])).logits[0] for one, ids in prompts.items()}
    engine = make_engine(tmp_path, config)
    for one, ids in prompts.items():
        for pooling in POOLINGS:
            engine.add(EngineRequest(f"{one}-{pooling}", tuple(ids), SamplingParams(), pooling=pooling))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        found |= {one.request_id: vector(one) for one in events.pooled}
    assert len(found) == 3 * len(prompts) and (engine.scheduler.num_preemptions > 0) == (config is TIGHT)
    for one, numbers in want.items():
        assert found[f"{one}-classes"].tolist() == pytest.approx(numbers.tolist(), abs=2e-4)
        assert len(found[f"{one}-last"]) == len(found[f"{one}-mean"]) == 48


@pytest.mark.parametrize(
    ("num_labels", "fields", "want"),
    [
        (1, {}, LabelsConfig(("LABEL_0",), Activation.SIGMOID)),
        (2, {}, LabelsConfig(("LABEL_0", "LABEL_1"), Activation.SOFTMAX)),
        (2, {"id2label": {0: "no", 1: "yes"}}, LabelsConfig(("no", "yes"), Activation.SOFTMAX)),
        (1, {"problem_type": "regression"}, LabelsConfig(("LABEL_0",), Activation.NONE)),
        (
            3,
            {"problem_type": "multi_label_classification"},
            LabelsConfig(tuple(f"LABEL_{at}" for at in range(3)), Activation.SIGMOID),
        ),
    ],
)
def test_config_names_the_classes(tmp_path: Path, num_labels: int, fields: dict[str, Any], want: LabelsConfig) -> None:
    make(tmp_path, "llama", num_labels, **fields)
    config = read_config(tmp_path)
    assert config.labels == want and not config.generates and config.architecture == "LlamaForCausalLM"
