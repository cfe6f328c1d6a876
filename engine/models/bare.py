"""Checkpoints of a model without a head: the names of their classes, and of their tensors.

Such files are published for vectors. Their class is that of the decoder inside of a model that generates, and their
tensors often lack the prefix that they have there. Depends on the standard library only.
"""

from collections.abc import Collection

from sluice_server.engine.models.fields import Fields

PREFIX = "model."
_MARKS = ("embed_tokens.weight", "norm.weight")  # of every decoder
_OF_DRAFTS = "fc.weight"  # of EAGLE heads, which have a layer of their own naming
_HEADS = ("lm_head.", "score.")
_STEMS = (
    *("Gemma", "Gemma2", "GptOss", "Granite", "Llama", "Mistral", "Mixtral", "Olmo2", "Phi3"),
    *("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3"),
)
BARE = {**{f"{stem}Model": f"{stem}ForCausalLM" for stem in _STEMS}, "Gemma3TextModel": "Gemma3ForCausalLM"}
CLASSIFIERS = {f"{stem}ForSequenceClassification": f"{stem}ForCausalLM" for stem in _STEMS}
HEADLESS = {**BARE, **CLASSIFIERS}  # models that do not generate, and the architecture of their decoder


def check_causal(raw: Fields) -> None:
    """Raises ServiceError for a decoder that was trained with tokens that see later ones: its vectors differ."""
    if raw.values.get("is_causal") not in (None, True):
        raise raw.wrong("is_causal", "is false; supported is true: attention to later tokens is not built")


def is_bare(names: Collection[str]) -> bool:
    """Returns whether these tensors lack the prefix that a model with a head gives them."""
    has_prefix = any(name.startswith(PREFIX) for name in names)
    return not has_prefix and all(mark in names for mark in _MARKS) and _OF_DRAFTS not in names


def full_name(name: str) -> str:
    """Returns a tensor's name in a model with a head."""
    return name if name.startswith(_HEADS) else PREFIX + name
