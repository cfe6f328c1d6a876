"""GGUF files of every architecture and type: logits against `transformers` on the checkpoint that was converted."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sluice_server.engine.models.gguf import checkpoint
from sluice_server.engine.models.gguf.blocks import IN_GROUPS
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.registry import read_served
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packed_weights import dequantise
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.services.checkpoint.gguf.folder import open_folder
from tests.oracle.checkpoints import Shape, make_checkpoint, reference
from tests.oracle.gguf_files import widened, write_gguf

CPU = torch.device("cpu")
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
EXPERTS = (("num_experts", 6), ("num_experts_per_tok", 2), ("moe_intermediate_size", 32), ("norm_topk_prob", True))
FULL, WINDOWED = "full_attention", "sliding_attention"
GEMMA2 = (("sliding_window", 9), ("query_pre_attn_scalar", 16))
GEMMA3 = (
    *(("sliding_window", 9), ("query_pre_attn_scalar", 32)),
    ("layer_types", [WINDOWED] * 5 + [FULL, WINDOWED]),
    ("rope_parameters", {FULL: {**LINEAR, "rope_theta": 1e6}, WINDOWED: {"rope_type": "default"}}),
)
# Rows of whole blocks of 256.
WIDE = Shape("llama", vocab=112, layers=1, hidden=256, intermediate=256, head_dim=64)
SHAPES = {
    "llama": Shape("llama"),
    "llama-tied": Shape("llama", tied=True, head_dim=24),
    "llama-biases": Shape("llama", options=(("attention_bias", True), ("mlp_bias", True))),
    "llama-linear": Shape("llama", options=(("rope_parameters", LINEAR),)),
    "llama-yarn": Shape("llama", options=(("rope_parameters", YARN),)),
    "llama-llama3": Shape("llama", head_dim=32, options=(("rope_parameters", LLAMA3),)),
    "mistral": Shape("mistral", options=(("sliding_window", None),)),
    "mixtral": Shape("mixtral", options=(("num_local_experts", 4), ("num_experts_per_tok", 2))),
    "qwen2": Shape("qwen2", head_dim=12),  # llama.cpp has no other size than that of hidden by heads
    "qwen2-tied": Shape("qwen2", tied=True, head_dim=12),
    "qwen3": Shape("qwen3", head_dim=32),
    "qwen3-experts": Shape("qwen3_moe", head_dim=32, options=EXPERTS),
    "gemma": Shape("gemma", tied=True),
    "gemma2": Shape("gemma2", layers=3, tied=True, options=GEMMA2),
    "gemma3": Shape("gemma3", layers=7, tied=True, head_dim=32, options=GEMMA3),
}
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def load(path: Path) -> Model:
    folder = open_folder(path)
    return load_model(folder, read_served(folder), torch.float32, CPU)


def logits_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    num = len(ids)
    meta = AttentionMetadata.build([num], [num], np.arange(8, dtype=np.int32)[None], 8, CPU)
    return model.logits(model.forward(ids, torch.arange(num), model.new_cache(8, 8), meta))


def some_ids(vocab: int) -> torch.Tensor:
    rng = random.Random(0)
    return torch.tensor([rng.randrange(vocab) for _ in range(50)])


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_equal_those_of_the_converted_checkpoint(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES[name])
    model = load(write_gguf(tmp_path, tmp_path / "x.gguf"))
    oracle, ids = reference(tmp_path), some_ids(SHAPES[name].vocab)
    with torch.inference_mode():
        want = oracle(ids[None]).logits[0]
    got = logits_of(model, ids)
    assert model.num_parameters == oracle.num_parameters()
    assert float((got - want).abs().max()) < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert model.notes == ()


def of_type(kind: str, directory: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A file of that type, ids, and the logits of what the `gguf` package reads."""
    make_checkpoint(directory, WIDE)
    path = write_gguf(directory, directory / "x.gguf", kind)
    rounded = directory / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_text((directory / "config.json").read_text())
    save_file(back(widened(path)), rounded / "model.safetensors", {"format": "pt"})
    ids = some_ids(112)
    with torch.inference_mode():
        return path, ids, reference(rounded)(ids[None]).logits[0]


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_is_widened_to_the_numbers_that_it_stands_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are permuted, too. All types, as on a GPU."""
    monkeypatch.setattr(checkpoint, "IN_GROUPS", {})
    path, ids, want = of_type(kind, tmp_path)
    model = load(path)
    got = logits_of(model, ids)
    assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max())
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert len(model.notes) == (kind not in ("F16", "BF16"))
    assert all(f"9 of {kind}" in note and "MiB" in note for note in model.notes)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("kind", list(IN_GROUPS))
def test_a_type_in_groups_of_32_is_computed_as_it_is(
    kind: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    path, ids, want = of_type(kind, tmp_path)
    model = load(path)
    logs, others = logits_of(model, ids).log_softmax(-1), want.log_softmax(-1)
    assert float((others.exp() * (others - logs)).sum(-1).mean()) < 0.02, "activations are rounded"
    assert any("are multiplied as they are" in note for note in model.notes)
    assert any(f"(1 of {kind})" in note for note in model.notes), "only the embeddings are widened"
    source = checkpoint.GgufCheckpoint([path], torch.float32, CPU)
    for name, tensor in back(widened(path)).items():
        if tensor.dim() == 2:
            packed = source.stored(name.removesuffix(".weight"), *tensor.shape)
            assert packed is not None and packed.bits == IN_GROUPS[kind][0]
            off = float((dequantise(packed) - tensor).abs().max())
            assert off == 0 if kind.endswith(("_0", "_1")) else off < 1e-3 * float(tensor.abs().max())


def test_projections_of_several_types_are_one_matrix(tmp_path: Path) -> None:
    """As files have them whose values of attention are of a better type."""
    make_checkpoint(tmp_path, WIDE)
    kinds = {"blk.0.attn_v.weight": "Q8_0", "blk.0.attn_k.weight": "Q4_1", "blk.0.ffn_up.weight": "Q6_K"}
    path = write_gguf(tmp_path, tmp_path / "x.gguf", lambda name: kinds.get(name, "Q4_0"))
    ids, model = some_ids(112), load(path)
    (tmp_path / "config.json").rename(tmp_path / "own.json")
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_text((tmp_path / "own.json").read_text())
    save_file(back(widened(path)), rounded / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        want = reference(rounded)(ids[None]).logits[0].log_softmax(-1)
    got = logits_of(model, ids).log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < 0.02
    assert any("1 of Q6_K" in note for note in model.notes)


def test_experts_in_groups_of_32_are_computed_as_they_are(tmp_path: Path) -> None:
    shape = Shape("mixtral", hidden=64, intermediate=96, options=SHAPES["mixtral"].options)
    make_checkpoint(tmp_path, shape)
    exact, ids = load(write_gguf(tmp_path, tmp_path / "x.gguf")), some_ids(shape.vocab)
    rounded = load(write_gguf(tmp_path, tmp_path / "y.gguf", "Q8_0"))
    want, got = logits_of(exact, ids).log_softmax(-1), logits_of(rounded, ids).log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < 0.02
    assert any("(1 of Q8_0)" in note for note in rounded.notes)


def back(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a Llama by their Hugging Face names, by what `transformers` knows of GGUF."""
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"}
    names |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    found = {}
    for name, tensor in tensors.items():
        match name.split("."):
            case ["blk", number, part, suffix]:
                if part in ("attn_q", "attn_k"):
                    heads = 4 if part == "attn_q" else 2
                    tensor = tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
                found[f"model.layers.{number}.{names[part]}.{suffix}"] = tensor.contiguous()
            case [top, suffix]:
                known = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
                found[f"{known[top]}.{suffix}"] = tensor
    return found
