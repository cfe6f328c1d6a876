"""Random adapters in PEFT's files, for a base's config."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from sluice_server.engine.adapters.files import Adapter
from sluice_server.engine.adapters.modules import Module, modules_of
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.registry import traits_of
from tests.oracle.checkpoints import reference

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules(config: ModelConfig) -> dict[str, Module]:
    return dict(modules_of(config, traits_of(config)))


def merged(directory: Path, adapter: Adapter) -> "transformers.PreTrainedModel":
    """The oracle for a checkpoint whose weights have an adapter merged into them: W + scale · B · A."""
    model = reference(directory)
    with torch.inference_mode():
        for name, part in adapter.parts.items():
            model.get_submodule(name).weight.data += part.scale * (part.b.float() @ part.a.float())  # type: ignore[operator] # a tensor
    return model


def write_adapter(
    folder: Path,
    config: ModelConfig,
    rank: int = 3,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    **fields: Any,  # noqa: ANN401 # of a JSON file
) -> dict[str, Tensor]:
    """Writes a PEFT folder and returns its tensors by their names in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = [one for one in targets if any(module.projection == one for module in modules(config).values())]
    generator = torch.Generator().manual_seed(seed)
    ranks = fields.get("rank_pattern", {})
    tensors = {}
    for name, module in modules(config).items():
        if module.projection in targets:
            own = next((one for key, one in ranks.items() if name.endswith(key)), rank)
            a = torch.randn(own, module.inputs, generator=generator) * 0.3
            b = torch.randn(module.outputs, own, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return tensors
