"""Tiny random checkpoints of models that also take images, and the reference that reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT: dict[str, Any] = {
    **{"vocab_size": 111, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 88, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN2 = {name: value for name, value in TEXT.items() if name != "head_dim"}
_QWEN: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_MROPE = {"mrope_section": [2, 3, 3]}


def config_of(name: str) -> Any:  # noqa: ANN401 # one of several classes
    """The configuration of a model of this name."""
    hf = transformers
    match name:
        case "gemma3":
            text = {**TEXT, "num_hidden_layers": 3, "sliding_window": 9, "tie_word_embeddings": True}
            return hf.Gemma3Config(text_config=text, vision_config=_VISION)
        case "llava":
            return hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**_VISION))
        case "internvl":
            squares = {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}
            return hf.InternVLConfig(text_config=hf.Qwen2Config(**QWEN2), vision_config=squares)
        case "llava_onevision":
            return hf.LlavaOnevisionConfig(text_config=hf.Qwen2Config(**QWEN2), vision_config=_VISION)
        case "smolvlm":
            return hf.SmolVLMConfig(text_config=hf.LlamaConfig(**{**TEXT, "pad_token_id": 0}), vision_config=_VISION)
        case "mistral3":
            text = {**TEXT, "sliding_window": None, "tie_word_embeddings": False}
            vision = hf.PixtralVisionConfig(**_VISION)
            texts = hf.MistralConfig(**text)
            return hf.Mistral3Config(text_config=texts, vision_config=vision, tie_word_embeddings=False)
        case "qwen2_5_vl":
            text = {**TEXT, "rope_scaling": {"type": "mrope", **_MROPE}}
            return hf.Qwen2_5_VLConfig(text_config=text, vision_config={**_QWEN, "fullatt_block_indexes": [0]})
        case _:
            text = {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, **_MROPE}}
            return hf.Qwen3VLConfig(text_config=text, vision_config={**_QWEN, "deepstack_visual_indexes": [0]})


# Each imports its module of transformers when it is first asked for.
CLASSES: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: transformers.Gemma3ForConditionalGeneration,
    "internvl": lambda: transformers.InternVLForConditionalGeneration,
    "llava": lambda: transformers.LlavaForConditionalGeneration,
    "llava_onevision": lambda: transformers.LlavaOnevisionForConditionalGeneration,
    "mistral3": lambda: transformers.Mistral3ForConditionalGeneration,
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": lambda: transformers.Qwen3VLForConditionalGeneration,
    "smolvlm": lambda: transformers.SmolVLMForConditionalGeneration,
}


def make_image_checkpoint(path: Path, name: str, *, as_published: bool) -> Any:  # noqa: ANN401 # one of several classes
    """Write a random float32 checkpoint; return its model. Published files name tensors in an older way."""
    torch.manual_seed(0)
    model: Any = CLASSES[name]()(config_of(name)).float().eval()
    for at, parameter in model.named_parameters():
        if at.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in at and name != "gemma3" else 0.0, std=0.2)
    model.save_pretrained(path, save_original_format=as_published)
    return model
