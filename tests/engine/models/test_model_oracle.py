"""Logits of every architecture against `transformers`: whole, in chunks, mixed with other rows, scattered blocks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "llama3": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
QWEN_WINDOW = (("use_sliding_window", True), ("sliding_window", 9), ("max_window_layers", 1))
EXPERTS = (("num_experts", 6), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40))
SPARSE = (*EXPERTS, ("decoder_sparse_step", 2), ("mlp_only_layers", [1]), ("norm_topk_prob", False))
GPT_OSS = (
    *(("num_local_experts", 6), ("num_experts_per_tok", 3), ("sliding_window", 9)),
    ("rope_parameters", {**ROPES["yarn"], "factor": 8.0, "truncate": False}),
)
GEMMA2 = (
    *(("sliding_window", 9), ("query_pre_attn_scalar", 5)),
    *(("attn_logit_softcapping", 2.0), ("final_logit_softcapping", 6.0)),
)
UNCAPPED = (("sliding_window", 9), ("attn_logit_softcapping", None), ("final_logit_softcapping", None))
FULL, WINDOWED = "full_attention", "sliding_attention"
GEMMA3 = (
    *(("sliding_window", 9), ("query_pre_attn_scalar", 20), ("final_logit_softcapping", 9.0)),
    ("layer_types", [WINDOWED, FULL, WINDOWED]),
    ("rope_parameters", {FULL: {**ROPES["linear"], "rope_theta": 1e6}, WINDOWED: {"rope_type": "default"}}),
)
SHARED = (*EXPERTS, ("shared_expert_intermediate_size", 56))
SPARSE_SHARED = (*SPARSE, ("shared_expert_intermediate_size", 24), ("use_sliding_window", True), ("sliding_window", 9))
GRANITE = (
    *(("embedding_multiplier", 12.0), ("residual_multiplier", 0.22)),
    *(("attention_multiplier", 0.4), ("logits_scaling", 3.0), ("rms_norm_eps", 0.01)),
)


def longrope(original: int, pairs: int, **more: object) -> tuple[tuple[str, object], ...]:
    """Fields of a model that was first trained with `original` positions, with divisors of so many frequencies."""
    factors = {"short_factor": [1.0 + i / 8 for i in range(pairs)], "long_factor": [1.5 + i for i in range(pairs)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more}
    return ("original_max_position_embeddings", original), ("rope_parameters", scaling)


# Below its first length transformers takes other factors than above: no prompt is, or all are.
PARTIAL = {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_type": "default"}
SHAPES = {
    "llama": Shape("llama"),
    "llama-tied-odd": Shape("llama", tied=True, head_dim=24, vocab=1023),
    "llama-biases": Shape("llama", options=(("attention_bias", True), ("mlp_bias", True))),
    **{f"llama-{name}": Shape("llama", options=(("rope_parameters", rope),)) for name, rope in ROPES.items()},
    "mistral-window": Shape("mistral", options=(("sliding_window", 10),)),
    "mistral-tied-full": Shape("mistral", tied=True, options=(("sliding_window", None),)),
    "qwen2": Shape("qwen2"),
    "qwen2-tied-window": Shape("qwen2", tied=True, options=QWEN_WINDOW),
    "qwen3": Shape("qwen3", head_dim=32),
    "qwen3-tied-mqa": Shape("qwen3", tied=True, kv_heads=1),
    "qwen3-experts": Shape("qwen3_moe", head_dim=32, options=(*EXPERTS, ("norm_topk_prob", True))),
    "qwen3-few-experts-fused": Shape("qwen3_moe", layers=4, tied=True, is_fused=True, options=SPARSE),
    "mixtral-window": Shape("mixtral", options=(("num_local_experts", 5), ("sliding_window", 10))),
    "mixtral-fused": Shape("mixtral", is_fused=True, options=(("num_local_experts", 4), ("num_experts_per_tok", 3))),
    "qwen2-experts": Shape("qwen2_moe", options=SHARED),
    "qwen2-few-experts-fused": Shape("qwen2_moe", layers=4, tied=True, is_fused=True, options=SPARSE_SHARED),
    "olmo2": Shape("olmo2"),
    "olmo2-mqa-biases": Shape("olmo2", kv_heads=1, tied=True, options=(("attention_bias", True),)),
    "phi3": Shape("phi3", hidden=64, options=(("sliding_window", 10),)),
    "phi3-partial-tied": Shape("phi3", hidden=64, tied=True, options=(("rope_parameters", PARTIAL),)),
    "phi3-short-factors": Shape("phi3", hidden=64, options=longrope(256, 8)),
    "phi3-long-factors": Shape("phi3", hidden=64, options=longrope(40, 6, partial_rotary_factor=0.75)),
    "granite": Shape("granite", hidden=64, options=GRANITE),
    "granite-tied-biases": Shape(
        "granite", hidden=64, tied=True, options=(*GRANITE, ("attention_bias", True), ("mlp_bias", True))
    ),
    "smollm3": Shape("smollm3", layers=5, options=(("attention_bias", True), ("mlp_bias", True))),
    "smollm3-window-tied": Shape(
        "smollm3",
        layers=3,
        tied=True,
        options=(("no_rope_layers", [0, 1, 0]), ("use_sliding_window", True), ("sliding_window", 9)),
    ),
    "gpt-oss": Shape("gpt_oss", head_dim=32, options=GPT_OSS),
    "gemma": Shape("gemma", tied=True),
    # Caps that scores and logits of this size reach; full attention in the second layer.
    "gemma2": Shape("gemma2", layers=3, tied=True, options=GEMMA2),
    "gemma2-wide-untied": Shape("gemma2", head_dim=256, kv_heads=1, options=(("sliding_window", 9),)),
    "gemma2-without-caps": Shape("gemma2", tied=True, options=UNCAPPED),
    "gemma3": Shape("gemma3", layers=3, tied=True, head_dim=32, options=GEMMA3),
}
LONG = {"gemma2-without-caps"}
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SHAPES]
CUTS = {"whole": [50], "sevens": [7] * 7 + [1], "mixed": [7, 7, 1, 1, 20, 14]}


@pytest.mark.parametrize(("cut", "ours"), [*((cut, True) for cut in CUTS), ("mixed", False)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(
    name: str, cut: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our own kernels where they exist, and with torch's operators alone."""
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    shape, rng = SHAPES[name], random.Random(name)
    make_checkpoint(tmp_path, shape)
    model = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
    ids = [[rng.randrange(shape.vocab) for _ in range(50)] for _ in range(2)]
    blocks = rng.sample(range(40), 20)
    tables = np.array([blocks[:10], blocks[10:]], dtype=np.int32)
    cache = model.new_cache(40, 8)
    other = AttentionMetadata.build([10], [10], tables[1:], 8, CPU)
    model.forward(torch.tensor(ids[1][:10]), torch.arange(10), cache, other)
    logits, at = [], 0
    for step, num in enumerate(CUTS[cut]):
        # A decode row of another sequence rides along: rows of one token come first.
        meta = AttentionMetadata.build([1, num], [11 + step, at + num], tables[::-1], 8, CPU)
        if num == 1:
            meta = AttentionMetadata.build([1, 1], [11 + step, at + 1], tables[::-1], 8, CPU)
        tokens = torch.tensor([ids[1][10 + step], *ids[0][at : at + num]])
        positions = torch.tensor([10 + step, *range(at, at + num)])
        logits.append(model.logits(model.forward(tokens, positions, cache, meta))[1:])
        at += num
    oracle = reference(tmp_path)
    with torch.inference_mode():
        want = oracle(torch.tensor(ids[:1])).logits[0, :at]
    assert model.num_parameters == oracle.num_parameters()
    got = torch.cat(logits)
    assert float((got - want).abs().max()) < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("alike", [[0, 1, 2, 3, 4, 5], [1, 4], [0, 3, 5]])
def test_of_experts_that_are_alike_the_first_are_chosen(
    alike: list[int], ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the router are equal. Elsewhere such experts may differ in the last bit by their position, and
    `torch.topk` does not define which of equal ones it takes: the oracle gets the definition."""
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    make_checkpoint(tmp_path, SHAPES["qwen3-experts"])
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        router = weights[f"model.layers.{layer}.mlp.gate.weight"]
        router[alike] = 3 * router[alike[:1]]  # often the best, and often the worst
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.arange(40)
    model = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
    meta = AttentionMetadata.build([40], [40], np.array([[0, 1, 2, 3, 4]], dtype=np.int32), 8, CPU)
    got = model.logits(model.forward(ids, ids, model.new_cache(5, 8), meta))

    def first(scores: torch.Tensor, num: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores[:, alike] = scores[:, alike[:1]]
        found = scores.sort(dim=dim, descending=True, stable=True)
        return found.values[:, :num], found.indices[:, :num]

    oracle = reference(tmp_path)
    monkeypatch.setattr(torch, "topk", first)
    with torch.inference_mode():
        want = oracle(ids[None]).logits[0]
    assert float((got - want).abs().max()) < 1e-4


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"], max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
    meta = AttentionMetadata.build([3], [3], np.array([[0]], dtype=np.int32), 8, CPU)
    hidden = model.forward(torch.tensor([5, 6, 7]), torch.arange(3), model.new_cache(1, 8), meta)
    with torch.inference_mode():
        want = reference(tmp_path)(torch.tensor([[5, 6, 7]])).logits[0]
    assert float((model.logits(hidden) - want).abs().max()) < 1e-4


def test_an_8b_shape_is_planned_in_no_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        """{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "eos_token_id": [128001, 128009]}"""
    )
    plan = plan_model(read_config(tmp_path), torch.bfloat16)
    assert plan.num_parameters == 8_030_261_248
    assert len(plan.shapes) == 291


def test_a_shape_with_experts_is_planned_in_no_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        """{"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "head_dim": 128,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}"""
    )
    plan = plan_model(read_config(tmp_path), torch.bfloat16)
    assert plan.num_parameters == 622_331_904 + 8 * 623_120_640  # of all 48 layers 30.5 billion
    assert plan.shapes["model.layers.7.mlp.experts.127.up_proj.weight"] == (768, 2048)
