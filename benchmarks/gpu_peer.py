"""Runs transformers' continuous batching over random weights of a shape, with the same requests as our engine.

Its own settings: what it finds for memory, graphs and attention is taken, and its warm-up is not counted.
"""

import time
from typing import Any

import torch
import transformers

from sluice_server.engine.models.config import ModelConfig

PATIENCE_S = 120.0  # without a result: something has gone wrong


def make_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401 # has no types
    """A Qwen3 of that shape."""
    shape = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tied_embeddings,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call] # half typed
    return model.eval()


def continuous_batching(model: Any, prompts: list[tuple[int, ...]], outputs: list[int]) -> dict[str, object]:  # noqa: ANN401 # has no types
    """All requests at once: seconds and tokens. Raises RuntimeError where one fails or is cut short."""
    # Imported here: it loads torch's compiler, which the tests of this module's neighbours need not wait for.
    from transformers.generation.continuous_batching.utils import WorkloadHints

    settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call] # half typed
        do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(outputs)
    )
    hints = WorkloadHints(max(map(len, prompts)), max(outputs), len(prompts))
    with model.continuous_batching_context_manager(
        generation_config=settings, workload_hints=hints, block=True, timeout=30
    ) as manager:
        begun = time.perf_counter()
        for i, (prompt, num) in enumerate(zip(prompts, outputs, strict=True)):
            manager.add_request(list(prompt), request_id=f"{i}", max_new_tokens=num, eos_token_id=-1)
        found = collect(manager, len(prompts))
        took = time.perf_counter() - begun
    if wrong := [i for i, num in enumerate(outputs) if found[f"{i}"] != num]:
        raise RuntimeError(f"transformers gave request {wrong[0]} {found[f'{wrong[0]}']} of {outputs[wrong[0]]} tokens")
    num = sum(found.values())
    return {"requests": len(prompts), "seconds": took, "tokens": num, "tokens_per_s": num / took}


def collect(manager: Any, num: int) -> dict[str, int]:  # noqa: ANN401 # has no types
    """Tokens of each request, once `num` have ended."""
    found: dict[str, int] = {}
    heard = time.perf_counter()
    while len(found) < num:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running() or time.perf_counter() - heard > PATIENCE_S:
                raise RuntimeError(f"transformers' continuous batching stopped after {len(found)} of {num} requests")
            continue
        heard = time.perf_counter()
        if result.error:
            raise RuntimeError(f"transformers failed request {result.request_id}: {result.error}")
        if result.is_finished():
            found[result.request_id] = len(result.generated_tokens)
    return found
