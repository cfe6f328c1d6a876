"""Random Hugging Face checkpoints of every supported architecture, and the reference that reads them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

# Each imports its module of transformers when it is first asked for.
CLASSES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "granite": lambda: (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "olmo2": lambda: (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "phi3": lambda: (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen2_moe": lambda: (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "smollm3": lambda: (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "gpt_oss": lambda: (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "llama": lambda: (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": lambda: (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": lambda: (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2": lambda: (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": lambda: (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma": lambda: (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "gemma2": lambda: (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3": lambda: (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "qwen3_moe": lambda: (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tiny model. Odd sizes on purpose.

    Attributes:
        is_fused: whether the experts of a layer are written as one tensor, not as one each.
        spread: standard deviation of weights; large enough that greedy tokens vary, and in wide layers less, else
            every layer multiplies what rounding loses.
    """

    architecture: str = "llama"
    vocab: int = 111
    hidden: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 88
    context: int = 256
    tied: bool = False
    is_fused: bool = False
    spread: float = 0.2
    options: tuple[tuple[str, Any], ...] = ()


def make_checkpoint(path: Path, shape: Shape, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """Write a random float32 checkpoint."""
    config_class, model_class = CLASSES[shape.architecture]()
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        initializer_range=shape.spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        **dict(shape.options),
    )
    torch.manual_seed(seed)
    model = model_class(config).float()
    one = 0.0 if "gemma" in shape.architecture else 1.0  # Gemmas' norms add 1 to their weights
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=one if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not shape.is_fused)
    return path


def reference(path: Path, dtype: torch.dtype = torch.float32) -> "transformers.PreTrainedModel":
    """The oracle for a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    assert isinstance(model, transformers.PreTrainedModel)
    model.train(False)
    return model


@torch.inference_mode()
def greedy(model: "transformers.PreTrainedModel", prompt: list[int], num: int) -> list[int]:
    """`num` greedy tokens after the prompt, end-of-sequence ignored."""
    ids = torch.tensor([prompt])
    past, out = None, []
    for _ in range(num):
        output = model(ids, past_key_values=past, use_cache=True)
        past = output.past_key_values
        out.append(int(output.logits[0, -1].argmax()))
        ids = torch.tensor([[out[-1]]])
    return out


@torch.inference_mode()
def beams(
    model: "transformers.PreTrainedModel", prompt: list[int], num: int, width: int, **options: object
) -> list[list[int]]:
    """The `width` best hypotheses of a beam search of at most `num` tokens, best first, padding cut off."""
    found = model.generate(  # type: ignore[operator] # typed as a tensor there
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return [_until_end(ids[len(prompt) :], 2) for ids in found.tolist()]


def _until_end(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids
