"""Finds the text model within checkpoints that also take images: its architecture, and its fields of config.json.

Such files have the text's fields in text_config, or in older ones beside the others, and leave out those that have the
defaults of the text's class. Depends on the standard library only.
"""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import Fields, Json, shown

_LLAMA: dict[str, Json] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL: dict[str, Json] = {
    **_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_GEMMA3: dict[str, Json] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TextClass:
    """The class of a text model: its architecture, and its defaults of fields that files leave out."""

    architecture: str
    assumed: Mapping[str, Json] = dataclasses.field(default_factory=dict)


_CLASSES: Mapping[str, TextClass] = {  # by model_type of text_config
    "gemma3_text": TextClass("Gemma3ForCausalLM", _GEMMA3),
    "llama": TextClass("LlamaForCausalLM", _LLAMA),
    "mistral": TextClass("MistralForCausalLM", _MISTRAL),
    "qwen2": TextClass("Qwen2ForCausalLM"),
    "qwen2_vl_text": TextClass("Qwen2ForCausalLM"),
    "qwen2_5_vl_text": TextClass("Qwen2ForCausalLM"),
    "qwen3": TextClass("Qwen3ForCausalLM"),
    "qwen3_vl_text": TextClass("Qwen3ForCausalLM"),
}
# The architectures with a text model that is served, and its model_type where a file names none.
WITH_TEXT: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "SmolVLMForConditionalGeneration": "llama",
}
_OF_WHOLE = ("tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype")


def text_fields(architecture: str, whole: Fields) -> tuple[str, dict[str, Json]]:
    """Returns the architecture of the text model and its fields; of other checkpoints what is given.

    Raises ServiceError UNIMPLEMENTED for a text model of another kind.
    """
    if architecture not in WITH_TEXT:
        return architecture, whole.values
    is_nested = whole.values.get("text_config") is not None
    text = whole.within("text_config").values if is_nested else whole.values
    kind = text.get("model_type") if is_nested else None
    found = _CLASSES.get(str(kind or WITH_TEXT[architecture]))
    if found is None:
        known = ", ".join(sorted(_CLASSES))
        message = f"the text model of {architecture} is {shown(kind)}, which is not supported; supported are {known}"
        raise unsupported("architecture", message)
    of_whole = {name: value for name in _OF_WHOLE if (value := whole.values.get(name)) is not None}
    return found.architecture, {**found.assumed, **text, **of_whole}
