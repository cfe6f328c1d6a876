"""An exported model loads in transformers, agrees with the trained one, and comes with its tokenizer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from torch import Tensor

from sluice_server.demo import bpe, checkpoint, export, recipe
from sluice_server.demo.checkpoint import DemoCheckpoint, Progress
from sluice_server.demo.model import Llama, ModelShape, num_parameters

SHAPE = ModelShape(320, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_positions=64)
PLAN = dataclasses.replace(recipe.DRAFT_RECIPE, shape=SHAPE)


def random_model() -> Llama:
    generator = torch.Generator().manual_seed(7)
    model = Llama(SHAPE)
    with torch.no_grad():
        for weight in model.parameters():  # in bf16 from the start, so that exporting loses nothing
            weight.copy_((torch.randn(weight.shape, generator=generator) * 0.2).bfloat16())
    return model.eval()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    training = tmp_path / "training"
    checkpoint.save(training / PLAN.name, DemoCheckpoint(Progress(1, 64, 0.1), random_model().state_dict(), {}))
    tokenizer = bpe.train_tokenizer(["def add(a, b):\n    return a + b\n"] * 9, SHAPE.vocab_size)
    (training / "tokenizer.json").write_text(tokenizer.to_str())
    export.export(PLAN, training, tmp_path / "model")
    return tmp_path / "model"


def test_transformers_agrees_with_the_trained_logits(exported: Path) -> None:
    ids = torch.randint(0, SHAPE.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.inference_mode():
        theirs: Tensor = oracle(ids).logits
        ours = random_model()(ids)
    assert isinstance(oracle, transformers.LlamaForCausalLM) and oracle.num_parameters() == num_parameters(
        random_model()
    )
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_transformers_reads_the_tokenizer_and_its_template(exported: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = "def add(a, b):\n    return a  -  b\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == bpe.END_OF_TEXT_ID
    parts = [{"type": "text", "text": "and\nsort"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}]
    asked = tokenizer.apply_chat_template([*messages, {"role": "user", "content": parts}], tokenize=False)
    assert asked == "# add\na + b\n\n# and\n# sort\n"


def test_nothing_half_written_is_left_and_others_may_read_it(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in exported.iterdir())
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_nothing_trained_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no checkpoint"):
        export.export(PLAN, tmp_path, tmp_path / "model")
