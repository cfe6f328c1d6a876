"""Tiny random checkpoints of LLaVA with each kind of vision tower, and the reference that reads them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.oracle.image_checkpoints import TEXT

IMAGE_ID = 110
NUM_PATCHES = 16
_VISION: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 7},
}
TOWERS: dict[str, Any] = {"clip": transformers.CLIPVisionConfig, "siglip": transformers.SiglipVisionConfig}


def make_llava(path: Path, tower: str, *, as_published: bool = False, **fields: Any) -> Any:  # noqa: ANN401 # untyped
    """Write a random float32 LLaVA; return its model. `fields` are of its config.json."""
    torch.manual_seed(0)
    fields = {"vision_feature_select_strategy": "default" if tower == "clip" else "full", **fields}
    text: Any = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=TOWERS[tower](**_VISION),
        image_token_index=IMAGE_ID,
        **fields,
    )
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "embedding")) or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
        elif "vision_tower" in name or "projector" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path, save_original_format=as_published)
    return model


def features(oracle: Any, pixels: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 # untyped
    """The rows, float32 [tokens, width], that the reference gives an image."""
    with torch.inference_mode():
        (found,) = oracle.get_image_features(pixel_values=pixels[None]).pooler_output
    assert isinstance(found, torch.Tensor)
    return found
