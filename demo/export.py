"""Write a trained demo model as a Hugging Face checkpoint: `python -m sluice_server.demo.export`.

In: checkpoints and the tokenizer under `.demo-training/`. Out: `demo/target` and `demo/draft`; each file is replaced
    atomically, so that readers never see a partial one. Weights are bf16: half the bytes, without measurable loss.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from sluice_server.demo import bpe, checkpoint, head, recipe
from sluice_server.demo.checkpoint import TOKENIZER_FILE, TRAINING_FOLDER
from sluice_server.demo.model import ModelShape

DEMO_FOLDER = Path(__file__).parent

# The model was trained on code and comments, not on dialogues: a user's message becomes a comment, answered by code.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set text = message.content -%}
{%- else -%}{%- set text = message.content | map(attribute='text') | join('') -%}{%- endif -%}
{%- if message.role == 'assistant' -%}{{ text }}{{ '\\n\\n' }}
{%- else -%}{{ '# ' + text.strip() | replace('\\n', '\\n# ') + '\\n' }}
{%- endif -%}
{%- endfor -%}"""


def main(
    training: Annotated[Path, typer.Option(help="where checkpoints are")] = TRAINING_FOLDER,
    folder: Annotated[Path, typer.Option(help="where the two models go")] = DEMO_FOLDER,
) -> None:
    """Export what is trained so far."""
    for plan in (recipe.TARGET_RECIPE, recipe.DRAFT_RECIPE):
        export(plan, training, folder / plan.name)


def export(plan: recipe.Recipe, training: Path, folder: Path) -> None:
    """Write every file of one model. Raises `typer.BadParameter` if `training` has no checkpoint of it."""
    saved = checkpoint.load(training / plan.name)
    if saved is None:
        raise typer.BadParameter(
            f"{training / plan.name} holds no checkpoint: run `python -m sluice_server.demo.train` first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "model.safetensors", saved.weights)
    checkpoint.write_whole(folder / TOKENIZER_FILE, (training / TOKENIZER_FILE).read_text())
    for name, content in descriptions(plan.shape).items():
        checkpoint.write_whole(folder / name, json.dumps(content, indent=2) + "\n")


def export_head(training: Path, folder: Path) -> None:
    """Write the head's weights, with the names and dtypes of published checkpoints, and its config.json."""
    plan = recipe.HEAD_RECIPE
    saved = checkpoint.load(training / plan.name)
    if saved is None:
        raise typer.BadParameter(
            f"{training / plan.name} holds no checkpoint: run `python -m sluice_server.demo.train` first"
        )
    (folder / plan.name).mkdir(parents=True, exist_ok=True)
    num_ids = len(saved.weights["d2t"])
    write_weights(folder / plan.name / "model.safetensors", saved.weights)
    checkpoint.write_whole(
        folder / plan.name / "config.json", json.dumps(head_config(plan.shape, num_ids), indent=2) + "\n"
    )


def head_config(shape: ModelShape, num_ids: int) -> dict[str, object]:
    """Returns config.json of the head. Published layers count from 0, and the outputs of the listed layers are read."""
    return model_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "draft_vocab_size": num_ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [num - 1 for num in head.BEHIND],
            "use_aux_hidden_state": True,
        },
    }


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    beside = path.with_name(path.name + ".new")
    small = {
        name: weight.to(torch.bfloat16) if weight.is_floating_point() else weight for name, weight in weights.items()
    }
    save_file(small, beside, metadata={"format": "pt"})
    beside.chmod(0o644)  # the safetensors library makes files readable by their owner only
    os.replace(beside, path)


def descriptions(shape: ModelShape) -> dict[str, dict[str, object]]:
    """Returns the JSON files of a checkpoint, by name."""
    ends: dict[str, object] = {"bos_token_id": bpe.END_OF_TEXT_ID, "eos_token_id": bpe.END_OF_TEXT_ID}
    return {
        "config.json": model_config(shape) | ends,
        "generation_config.json": ends | {"do_sample": False},
        "tokenizer_config.json": tokenizer_config(shape),
    }


def model_config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: ModelShape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bpe.END_OF_TEXT,
        "eos_token": bpe.END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


if __name__ == "__main__":
    typer.run(main)
