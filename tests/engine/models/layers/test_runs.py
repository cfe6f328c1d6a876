"""Layers in one call, compared with the same layers one by one: no bit may differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers import runs
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.kernels.cpu import builds, native_layers
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.models.test_model_oracle import SHAPES
from tests.kernels.cpu.native import kernels_of
from tests.oracle.checkpoints import Shape, make_checkpoint

CPU = torch.device("cpu")
BLOCK = 8
FEW = Shape("llama", layers=6)
# Architectures of which every layer is one call.
WHOLE = ("llama", "mistral-window", "qwen2-tied-window", "qwen3", "qwen3-experts", "mixtral-fused", "gemma2", "gemma3")

pytestmark = pytest.mark.skipif(not builds.is_available(), reason="installed without a C++ compiler")


class Calls:
    """How many layers each call of the kernels computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        many, one = native_layers.layers, native_layers.layer

        def note_many(table: Tensor, *rest: Any) -> None:  # noqa: ANN401 # whatever `native_layers.layers` takes
            self.sizes.append(len(table))
            many(table, *rest)

        def note_one(*given: Any) -> None:  # noqa: ANN401 # whatever `native_layers.layer` takes
            self.sizes.append(1)
            one(*given)

        monkeypatch.setattr(native_layers, "layers", note_many)
        monkeypatch.setattr(native_layers, "layer", note_one)

    def take(self) -> list[int]:
        """Those since the last call."""
        taken, self.sizes[:] = [*self.sizes], []
        return taken


def load(path: Path, shape: Shape, dtype: torch.dtype = torch.float32, weights: str = "") -> Model:
    """A model of random weights."""
    make_checkpoint(path, shape)
    return load_model(path, read_config(path), dtype, CPU, pack=LinearPacker(weights))


def states(
    model: Model, cache: Sequence[Tensor], *, kept: Tensor | None = None, groups: Sequence[int] = ()
) -> list[Tensor]:
    """Hidden states of three steps: prompts, a chunk beside a decode row, and two decode rows; and the cache."""
    found = []
    tables = np.arange(20, dtype=np.int32).reshape(2, 10)
    for lens, contexts in (([5, 9], [5, 9]), ([1, 7], [6, 16]), ([1, 1], [7, 17])):
        meta = AttentionMetadata.build(lens, contexts, tables, BLOCK, CPU)
        if groups:
            other = AttentionMetadata.build(lens, contexts, tables[::-1], BLOCK, CPU)
            meta = meta.with_groups((meta, other), tuple(groups))
        ids = torch.arange(meta.num_tokens) % 100 + 3
        found.append(model.forward(ids, meta.positions, list(cache), meta, kept).clone())
    return [*found, *cache]


def both(model: Model, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None = None, **more: object) -> list[int]:
    """The sizes of calls; asserts that one by one all is the same."""
    calls = Calls(monkeypatch)
    many, sizes = states(model, model.new_cache(20, BLOCK, dtype), **more), calls.take()  # type: ignore[arg-type] # of two types
    with monkeypatch.context() as patched:
        patched.setattr(runs, "MOST_WORK", 0)
        one_by_one = states(model, model.new_cache(20, BLOCK, dtype), **more)  # type: ignore[arg-type] # likewise
    assert set(calls.take()) <= {1}
    assert all(torch.equal(a, b) for a, b in zip(many, one_by_one, strict=True))
    assert not any(bool(one.isnan().any()) for one in many[:3])
    return sizes


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_architecture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, SHAPES[name])
    sizes = both(model, monkeypatch)
    if name in WHOLE:
        assert sizes == 3 * [model.num_layers]


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_every_format(form: str, cache: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    model = load(tmp_path, FEW, dtype, form if form.startswith("int") else "")
    if form == "bfloat16":
        monkeypatch.setattr("sluice_server.kernels.formats.weight_formats.computes_bfloat16", lambda: False)
    assert sum(both(model, monkeypatch, cache)) in (0, 18)


@pytest.mark.parametrize("name", builds.KNOWN)
def test_every_instruction_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels_of(name)
    model = load(tmp_path, FEW)
    both(model, monkeypatch)  # the table of these kernels is made anew for others
    monkeypatch.setattr(builds, "MODULE", module)
    assert both(model, monkeypatch) == 3 * [6]


def test_layers_with_block_tables_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, FEW)
    alike = states(model, model.new_cache(20, BLOCK))
    assert both(model, monkeypatch, groups=[0, 1, 0, 0, 1, 1]) == 3 * [6]
    other = states(model, model.new_cache(20, BLOCK), groups=[0, 1, 0, 0, 1, 1])
    assert torch.equal(alike[0], other[0]) and not torch.equal(alike[4], other[4])  # elsewhere in the cache


def test_tokens_that_are_wanted_behind_the_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, FEW)
    everything = states(model, model.new_cache(20, BLOCK))
    assert both(model, monkeypatch, kept=torch.tensor([1])) == 3 * [6]
    wanted = states(model, model.new_cache(20, BLOCK), kept=torch.tensor([1]))
    assert all(torch.equal(a[1:2], b) for a, b in zip(everything[:3], wanted[:3], strict=True))


def test_a_hook_ends_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, FEW)
    seen: list[Tensor] = []
    model.hidden_state_hooks = {2: lambda h, slots, num: seen.append(h[:num].clone())}
    assert both(model, monkeypatch) == 3 * [2, 4]
    assert len(seen) == 6 and all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_a_call_has_no_more_work_than_may_go_on_unattended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, FEW)
    work, told = next(iter(model._layers)).work, []
    model.on_layer = lambda: told.append(model.layers_done)
    monkeypatch.setattr(runs, "MOST_WORK", 8 * 4 * work)  # four layers of eight tokens
    assert both(model, monkeypatch) == [2, 2, 2, 4, 2, 6]
    assert told[:6] == [2, 4, 6, 10, 12, 18]


def test_another_cache_is_written_to(tmp_path: Path) -> None:
    model = load(tmp_path, FEW)
    first, second = model.new_cache(20, BLOCK), model.new_cache(20, BLOCK)
    states(model, first)
    before = [layer.clone() for layer in first]
    assert all(torch.equal(a, b) for a, b in zip(states(model, second), [*states(model, first)], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
