"""Tiny random checkpoints of LLaVA with each kind of vision tower, and the reference that reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.oracle.image_checkpoints import TEXT

IMAGE_ID = 110
NUM_PATCHES = 16
_VISION: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 7},
}
TOWERS: dict[str, Callable[..., Any]] = {
    "clip": lambda **fields: transformers.CLIPVisionConfig(**fields),
    "siglip": lambda **fields: transformers.SiglipVisionConfig(**fields),
}


def make_llava(path: Path, tower: str, *, as_published: bool = False, **fields: Any) -> Any:  # noqa: ANN401 # untyped
    """Write a random float32 LLaVA; return its model. `fields` are of its config.json."""
    torch.manual_seed(0)
    fields = {"vision_feature_select_strategy": "default" if tower == "clip" else "full", **fields}
    text: Any = transformers.LlamaConfig(**{**TEXT, **fields.pop("text", {})})
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=TOWERS[tower](**{**_VISION, **fields.pop("vision", {})}),
        **{"image_token_index": IMAGE_ID, **fields},
    )
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.float().eval()
    vision: Any = config.vision_config
    # With larger weights a wide tower makes another answer of a rounded bit.
    std = 0.2 * (48 / max(48, vision.hidden_size)) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "embedding")) or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
        elif "vision_tower" in name or "projector" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(path, save_original_format=as_published)
    return model


def features(oracle: Any, pixels: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 # untyped
    """The rows, float32 [tokens, width], that the reference gives an image."""
    with torch.inference_mode():
        (found,) = oracle.get_image_features(pixel_values=pixels[None]).pooler_output
    assert isinstance(found, torch.Tensor)
    return found


WORDS_IMAGE_ID = 259  # of a checkpoint with a tokenizer, behind three special tokens and the bytes
PLACE = "<image>"
TEMPLATE = (  # as those of the published LLaVA-1.5 checkpoints
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PREPROCESSOR: dict[str, Any] = {
    **{"image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 28}},
    **{"do_center_crop": True, "crop_size": {"height": 28, "width": 28}, "do_rescale": True, "do_normalize": True},
    **{"resample": 3, "rescale_factor": 1 / 255, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
}


def make_served_llava(path: Path, *, context: int = 1024, **fields: Any) -> Any:  # noqa: ANN401 # untyped
    """Write a random LLaVA with tokenizer, chat template and preprocessor, as a directory that can be served. `fields`:
    `text` and `vision` of its config.json."""
    words = {"vocab_size": 260, "max_position_embeddings": context, **fields.get("text", {})}
    model = make_llava(path, "clip", **{**fields, "text": words}, image_token_index=WORDS_IMAGE_ID)
    write_words(path)
    side = model.config.vision_config.image_size
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **sizes}))
    return model


def write_words(path: Path, *more: str, template: str = TEMPLATE) -> None:
    """Write a tokenizer of bytes, with a word for images and others behind it, and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "<unk>": 1, "</s>": 2, **{one: 3 + at for at, one in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in ("<s>", "</s>", PLACE, *more)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
