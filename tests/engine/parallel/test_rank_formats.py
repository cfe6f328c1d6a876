"""Ranks over further architectures and published formats: logits are those of one rank, or of transformers."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import LocalSums, RankSums, thread_sums
from sluice_server.kernels.cpu import builds
from tests.engine.models.test_model_oracle import SHAPES
from tests.engine.models.test_stored import FORMS
from tests.engine.parallel.rank_threads import run_ranks, timed_sums
from tests.engine.parallel.test_rank_models import computed, token_ids
from tests.oracle import published
from tests.oracle.checkpoints import Shape, make_checkpoint, reference
from tests.oracle.gguf_files import write_gguf

CPU = torch.device("cpu")
NAMES = [
    *("llama-tied-odd", "mistral-window", "qwen2-tied-window", "qwen3-tied-mqa", "mixtral-window", "mixtral-fused"),
    *("qwen2-few-experts-fused", "qwen3-few-experts-fused", "olmo2-mqa-biases", "phi3-partial-tied"),
    *("phi3-short-factors", "granite-tied-biases", "smollm3-window-tied", "gemma", "gemma2-wide-untied", "gemma3"),
]


def load(path: Path, sums: RankSums, *, expert_parallel: bool = False) -> Model:
    shape = ParallelShape(sums.size, sums.rank, sum_shards=sums.shards, expert_parallel=expert_parallel)
    return load_model(path, read_config(path), torch.float32, CPU, 64, ranks=Ranks(shape, sums))


def over(path: Path, size: int, shards: int = 0) -> Tensor:
    """Logits of rank 0 among so many."""
    if size == 1:
        return computed(load(path, LocalSums(shards)))
    return run_ranks(timed_sums(size, shards), lambda sums: computed(load(path, sums)))[0]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_over_ranks_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES[name])
    with torch.inference_mode():
        wanted = reference(tmp_path)(torch.tensor([token_ids(SHAPES[name].vocab)])).logits[0]
    wanted = torch.cat((wanted[:18], wanted[-3:]))
    for size in (2, 4):
        found = over(tmp_path, size)
        assert float((found - wanted).abs().max()) < 1e-4
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators promise no bits")
@pytest.mark.parametrize("form", list(FORMS))
def test_bits_of_a_quantised_checkpoint_depend_on_shards_alone(form: str, tmp_path: Path) -> None:
    fields, quantise, _ = FORMS[form]
    directory = published.publish(tmp_path, fields, quantise).directory
    wanted = over(directory, 1, 4)
    assert all(torch.equal(over(directory, size, 4), wanted) for size in (2, 4))
    whole = computed(load_model(directory, read_config(directory), torch.float32, CPU, 64))
    assert float((wanted - whole).norm() / whole.norm()) < 0.1, "activations are rounded in other groups"


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_ranks_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    shape = Shape(hidden=256, heads=4, kv_heads=2, head_dim=128, intermediate=512)
    config = read_config(make_checkpoint(tmp_path, shape))
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path, tmp_path / "gguf" / "model.gguf", kind)

    def logits(sums: RankSums) -> Tensor:
        ranks = Ranks(ParallelShape(sums.size, sums.rank), sums)
        return computed(load_model(tmp_path / "gguf", config, torch.float32, CPU, 64, ranks=ranks))

    found = run_ranks(thread_sums(2, timeout_s=60.0), logits)[0]
    wanted = computed(load_model(tmp_path / "gguf", config, torch.float32, CPU, 64))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_of_experts_in_blocks(expert_parallel: bool, tmp_path: Path) -> None:
    experts = (("num_local_experts", 4), ("num_experts_per_tok", 2))
    shape = Shape("gpt_oss", hidden=64, heads=4, head_dim=32, intermediate=128, options=experts)
    directory = published.publish_mxfp4(tmp_path, shape).directory

    def logits(sums: RankSums) -> Tensor:
        return computed(load(directory, sums, expert_parallel=expert_parallel))

    wanted = logits(LocalSums(4))
    for size in (2, 4):
        assert torch.equal(run_ranks(thread_sums(size, 4, timeout_s=60.0), logits)[0], wanted)


def test_shards_that_cut_a_group_are_refused_by_name(tmp_path: Path) -> None:
    fields, quantise, _ = FORMS["awq"]
    shape = dataclasses.replace(published.SHAPE, intermediate=384)
    directory = published.publish(tmp_path, fields, quantise, shape).directory
    with pytest.raises(ServiceError, match=r"--sum-shards: model\.layers\.0\.mlp\.down_proj: inputs 0 to 191 .*128"):
        load(directory, LocalSums(2))


@pytest.mark.parametrize("size", [1, 2])
def test_a_missing_tensor_is_named_on_every_rank(size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"][:16].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for sums in thread_sums(size):
        with pytest.raises(ServiceError, match=r"k_proj.weight has shape \[16, 48\]; config.json implies \[32, 48\]"):
            load(tmp_path, sums)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.randn(32, 48)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for sums in thread_sums(size):
        with pytest.raises(
            ServiceError, match=r"no safetensors file holds the tensor model\.layers\.1\.mlp\.down_proj"
        ):
            load(tmp_path, sums)


def test_a_model_that_ranks_cannot_share_out_is_refused_before_it_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(heads=6))
    with pytest.raises(ServiceError, match="--tensor-parallel-size: 4 does not divide the model's 6 attention heads"):
        load(tmp_path, thread_sums(4)[0])


def test_a_rank_has_the_cache_of_its_heads(tmp_path: Path) -> None:
    """One head for two ranks is on both."""
    make_checkpoint(tmp_path, Shape(heads=4, kv_heads=2))
    sizes = {}
    for size in (1, 2, 4):
        models = run_ranks(thread_sums(size), lambda sums: load(tmp_path, sums))
        (sizes[size],) = {model.token_bytes(torch.float32) for model in models}
        assert all(model.new_cache(2, 8)[0].shape[3] == max(2 // size, 1) for model in models)
        assert {model.config.vocab_size for model in models} == {111}
        assert sum(len(model.embeddings) for model in models) == 111
    assert sizes[1] == 2 * sizes[2] == 2 * sizes[4]


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators keep weights as they are mapped from the file")
def test_a_rank_takes_the_memory_of_its_share(tmp_path: Path) -> None:
    """Also at its peak, while it is loaded: matrices are of a size that a large page holds."""
    small = make_checkpoint(tmp_path / "small", Shape())
    fields = json.loads((small / "config.json").read_text())
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    fields |= {**sizes, "intermediate_size": 4096, "num_hidden_layers": 8, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plan = plan_model(read_config(tmp_path), torch.bfloat16)
    held = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in plan.shapes.items()}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    program = [sys.executable, "-m", "tests.engine.parallel.rank_memory", str(small), str(tmp_path), "1", "2"]
    found = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    share = plan.num_parameters * 2 / 2
    assert 0.9 < int(found.stdout) / share < 1.1


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_rank_counts_the_parameters_of_the_whole_model(expert_parallel: bool, tmp_path: Path) -> None:
    experts = (("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40))
    make_checkpoint(tmp_path, Shape("qwen3_moe", options=experts))
    wanted = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU, 64).num_parameters
    for model in run_ranks(thread_sums(2), lambda sums: load(tmp_path, sums, expert_parallel=expert_parallel)):
        assert model.num_parameters == wanted
