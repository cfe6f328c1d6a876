"""Logits of adapters beside packed weights against `transformers` on merged weights; rows do not depend on others."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.adapters.files import Adapter, read_adapter
from sluice_server.engine.adapters.products import products_of
from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.models.layers.sides import HostSides
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.test_engine_oracle import SHAPES
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

CPU = torch.device("cpu")
LENGTH = 21
LONG = ("gemma3", "phi3-window")
BY_TORCH = ("llama", "phi3", "qwen2-experts")  # those of its cases that are not long
CASES = [
    pytest.param(name, ours, marks=[pytest.mark.long] * (name in LONG or not (ours or name in BY_TORCH)))
    for name in SHAPES
    for ours in (True, False)
]


def some_adapters(folder: Path, config: ModelConfig) -> list[Adapter]:
    """Of ranks 3, 8 and 64: all projections, some, and one pattern; with either scale."""
    write_adapter(folder / "a", config, rank=3, seed=1, lora_alpha=2)
    write_adapter(folder / "b", config, rank=8, seed=2, targets=("v_proj", "up_proj", "o_proj", "qkv_proj"))
    fields = {"use_rslora": True, "rank_pattern": {"o_proj": 5}, "lora_alpha": 1}
    targets = ("q_proj", "o_proj", "down_proj", "gate_proj", "gate_up_proj")
    write_adapter(folder / "c", config, rank=64, seed=3, targets=targets, **fields)
    return [read_adapter(folder, name, modules(config)) for name in "abc"]


class Batch:
    """Sequences of one model, each with an adapter or none, computed together or alone."""

    def __init__(self, model: Model, ids: Sequence[list[int]], adapters: Sequence[Adapter | None]) -> None:
        self.model, self.ids = model, ids
        num = model.config.num_layers
        self.products = [None if one is None else products_of(one.parts, model.foldings, num) for one in adapters]

    def logits(self, rows: Sequence[int], cut: int) -> list[Tensor]:
        """Logits of the sequences `rows`, computed side by side in two chunks of which the first has `cut` tokens."""
        blocks = -(-LENGTH // 8)
        tables = np.arange(len(rows) * blocks, dtype=np.int32).reshape(len(rows), blocks)
        cache = self.model.new_cache(tables.size, 8)
        found: list[list[Tensor]] = [[] for _ in rows]
        for first, end in ((0, cut), (cut, LENGTH)):
            num = end - first
            meta = AttentionMetadata.build([num] * len(rows), [end] * len(rows), tables, 8, CPU)
            groups = [
                (torch.arange(at * num, (at + 1) * num), own)
                for at, row in enumerate(rows)
                if (own := self.products[row]) is not None
            ]
            ids = torch.tensor([token for row in rows for token in self.ids[row][first:end]])
            sides = HostSides(groups) if groups else None
            hidden = self.model.forward(ids, meta.positions, cache, meta, sides=sides)
            for at, part in enumerate(self.model.logits(hidden).split(num)):
                found[at].append(part)
        return [torch.cat(parts) for parts in found]


def compare(shape: Shape, folder: Path, seed: str, *, ours: bool) -> None:
    """Compares a base row and one of each of three adapters, in one batch, with these alone and with merged weights."""
    rng = random.Random(seed)
    base = make_checkpoint(folder / "base", shape)
    config = read_config(base)
    adapters = [None, *some_adapters(folder, config)]
    ids = [[rng.randrange(shape.vocab) for _ in range(LENGTH)] for _ in adapters]
    batch = Batch(load_model(base, config, torch.float32, CPU), ids, adapters)
    together = batch.logits(range(len(adapters)), cut=13)
    for row, adapter in enumerate(adapters):
        if adapter is not None or ours:  # of the base alone, torch's attention may sum in another order
            assert torch.equal(batch.logits([row], cut=13)[0], together[row])
        oracle = reference(base) if adapter is None else merged(base, adapter)
        with torch.inference_mode():
            want = oracle(torch.tensor([ids[row]])).logits[0]
        assert float((together[row] - want).abs().max()) < 2e-4 * max(1.0, float(want.abs().max()))
        assert torch.equal(together[row].argmax(-1), want.argmax(-1))
        if adapter is not None:
            with torch.inference_mode():
                plain = reference(base)(torch.tensor([ids[row]])).logits[0]
            assert float((plain - want).abs().max()) > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize(("name", "ours"), CASES)
def test_rows_equal_merged_weights_and_do_not_depend_on_company(
    name: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels, and torch's alone."""
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    compare(SHAPES[name], tmp_path, name, ours=ours)


@pytest.mark.skipif(builds.MODULE is None, reason="not built")
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_rows_of_a_model_of_many_panels_are_as_those_of_few(name: str, tmp_path: Path) -> None:
    """Threads compute several panels at once. No panel divides the gates: those of fused projections begin within."""
    compare(dataclasses.replace(SHAPES[name], intermediate=1080), tmp_path, name, ours=True)


def test_rows_of_a_model_in_bfloat16_do_not_depend_on_company(tmp_path: Path) -> None:
    """As above where x is rounded; logits are as near to those of merged weights as the format allows."""
    shape, rng = SHAPES["llama"], random.Random(7)
    base = make_checkpoint(tmp_path / "base", shape)
    config = read_config(base)
    adapters = [None, *some_adapters(tmp_path, config)]
    ids = [[rng.randrange(shape.vocab) for _ in range(LENGTH)] for _ in adapters]
    batch = Batch(load_model(base, config, torch.bfloat16, CPU), ids, adapters)
    together = batch.logits(range(len(adapters)), cut=13)
    for row, adapter in enumerate(adapters):
        assert torch.equal(batch.logits([row], cut=13)[0], together[row])
        oracle = reference(base) if adapter is None else merged(base, adapter)
        with torch.inference_mode():
            want = oracle(torch.tensor([ids[row]])).logits[0]
        assert float((together[row] - want).abs().max()) < 0.05 * float(want.abs().max())
