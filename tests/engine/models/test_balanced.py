"""Channels that are balanced before weights are rounded: the model's function stays, and outliers are gone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.models.balanced import BalancedWeights, ChannelPair, channel_factors, channel_pairs
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.registry import traits_of
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import ThreadSums, thread_sums
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.parallel.rank_threads import run_ranks
from tests.oracle.checkpoints import Shape, make_checkpoint

CPU = torch.device("cpu")
OPTIONS = {
    "llama": (("attention_bias", True), ("mlp_bias", True)),
    "qwen2": (),
    "gemma2": (),
    "qwen3_moe": (("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 24)),
    "gpt_oss": (("num_local_experts", 4), ("num_experts_per_tok", 2)),
}


def logits_of(model: Model, num: int = 24) -> Tensor:
    meta = AttentionMetadata.build([num], [num], np.arange(2, dtype=np.int32)[None], 16, CPU)
    ids = torch.arange(num) * 7 % model.config.vocab_size
    return model.logits(model.forward(ids, meta.positions, model.new_cache(2, 16, torch.float32), meta))


def grow(folder: Path, by: float) -> None:
    """Makes channels between projections larger, without changing the model's function."""
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.endswith("up_proj.weight"):
            tensors[name][3] *= by
            if name.replace("weight", "bias") in tensors:
                tensors[name.replace("weight", "bias")][3] *= by
            tensors[name.replace("up_proj", "down_proj")][:, 3] /= by
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", list(OPTIONS))
def test_balanced_weights_are_the_same_model(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(architecture, options=OPTIONS[architecture]))
    if architecture != "gpt_oss":
        grow(tmp_path, 512.0)
    config = read_config(tmp_path)
    source = Checkpoint(tmp_path, torch.float32, CPU)
    balanced = BalancedWeights(source, channel_pairs(config, traits_of(config)))
    plain = logits_of(Model(config, source, torch.float32, CPU, 64))
    found = logits_of(Model(config, balanced, torch.float32, CPU, 64))
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-4)
    if architecture != "gpt_oss":
        at = "mlp.experts.0" if architecture == "qwen3_moe" else "mlp"
        size = config.intermediate_size if config.experts is None else config.experts.intermediate_size
        name, shape = f"model.layers.1.{at}.up_proj.weight", (size, config.hidden_size)
        great = float(source.get(name, shape)[3].norm()), float(balanced.get(name, shape)[3].norm())
        assert great[1] < great[0] / 100


def test_channels_that_do_not_stand_out_are_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    config, source = read_config(tmp_path), Checkpoint(tmp_path, torch.float32, CPU)
    balanced = BalancedWeights(source, channel_pairs(config, traits_of(config)))
    for name, shape in (("self_attn.v_proj", (32, 48)), ("mlp.up_proj", (88, 48)), ("mlp.down_proj", (48, 88))):
        full = f"model.layers.0.{name}.weight"
        assert torch.equal(balanced.get(full, shape), source.get(full, shape))


def test_balanced_weights_stay_in_the_format_that_layers_compute_in(tmp_path: Path) -> None:
    """On a GPU the inputs of a linear layer have its weight's format; powers of two lose nothing."""
    make_checkpoint(tmp_path, Shape("llama", options=OPTIONS["llama"]))
    grow(tmp_path, 512.0)
    config = read_config(tmp_path)
    balanced = BalancedWeights(Checkpoint(tmp_path, torch.bfloat16, CPU), channel_pairs(config, traits_of(config)))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert balanced.get(name, tuple(tensor.shape)).dtype is torch.bfloat16, name


def test_factors_are_powers_of_2_and_meet_halfway() -> None:
    made, read = torch.full((7,), 4.0), torch.full((7,), 1.0)
    made[1], read[1] = 4.0 * 128.0**2, 1.0 / 128.0**2
    made[2], read[3] = 0.0, 0.0
    factors = channel_factors(made, read)
    assert factors.tolist() == [1.0, 128.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_heads_that_share_a_value_share_its_factor() -> None:
    pair = ChannelPair("v", "o", rows=4, width=8, outputs=8, dim=2, repeats=3)
    assert pair.spread(torch.arange(4)).tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]


def test_outliers_cost_a_rounded_model_nothing(tmp_path: Path) -> None:
    """A function-preserving change of scale between two projections changes a rounded model's error little."""
    off = []
    for by in (1.0, 128.0):
        make_checkpoint(tmp_path, Shape(intermediate=96))
        grow(tmp_path, by)
        config = read_config(tmp_path)
        plain, rounded = (
            logits_of(load_model(tmp_path, config, torch.float32, CPU, 64, LinearPacker(weights)))
            for weights in ("", "int8")
        )
        off.append(float((rounded - plain).square().mean().sqrt()))
    assert off[1] < 1.15 * off[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_ranks_divide_by_the_factors_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    """Of channels that they share out; with 4 ranks, two have the same key/value head."""
    make_checkpoint(tmp_path, Shape(architecture, options=OPTIONS[architecture]))
    grow(tmp_path, 512.0)
    config = read_config(tmp_path)
    source, traits = Checkpoint(tmp_path, torch.float32, CPU), traits_of(config)
    alone = BalancedWeights(source, channel_pairs(config, traits))

    def factors(sums: ThreadSums) -> list[Tensor]:
        pairs = list(channel_pairs(config, traits, ParallelShape(tensor_size=size, rank=sums.rank)))
        own = BalancedWeights(source, pairs, sums)
        return [own.get(f"{one.producer}.weight", (one.rows, one.width)) for one in pairs]

    wanted = [alone.get(f"{one.producer}.weight", (one.rows, one.width)) for one in channel_pairs(config, traits)]
    for found in run_ranks(thread_sums(size), factors):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
