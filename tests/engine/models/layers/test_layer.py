"""A decoder layer as one call, compared with the same layer operation by operation."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.layers import layer as one_call
from sluice_server.engine.models.layers.experts import ExpertRouter, pack_experts
from sluice_server.engine.models.layers.layer import Layer
from sluice_server.engine.models.layers.mlp import DenseMlp
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import slot_width
from sluice_server.kernels.layout.trees import Tree
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 80, 112, 4, 2, 32, 4
FORMATS = ["float32", "bfloat16", "int8", "int4"]
CACHES = [torch.float32, torch.bfloat16, torch.int8]
LENS, CONTEXTS = [1, 1, 5, 3], [3, 18, 5, 9]  # of rows in a step


@pytest.fixture(params=builds.KNOWN, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with the kernels of each instruction set of this machine."""
    monkeypatch.setattr(builds, "MODULE", kernels_of(request.param))
    monkeypatch.setattr("sluice_server.kernels.formats.weight_formats.computes_bfloat16", lambda: False)


def make(
    form: str, *, bias: bool = False, norms: bool = False, window: int | None = None, num_experts: int = 0
) -> Layer:
    """A layer of random weights; `norms`: of heads, and of rows where they are not folded into the weights."""
    torch.manual_seed(5)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32

    def linear(rows: int, inputs: int, *, gated: bool = False) -> PackedLinear:
        weight, vector = torch.randn(rows, inputs) * inputs**-0.5, torch.randn(rows)
        return weight_formats.pack(weight.to(dtype), vector.to(dtype) if bias else None, gated=gated, weights=form)

    norm = torch.rand(HIDDEN).to(dtype) if norms else None

    def mlp() -> DenseMlp:
        return DenseMlp(linear(2 * INNER, HIDDEN, gated=True), linear(HIDDEN, INNER), norm)

    return Layer(
        qkv=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        output=linear(HIDDEN, HEADS * DIM),
        mlp=pack_experts(ExpertRouter(linear(num_experts, HIDDEN), 2, True), [mlp() for _ in range(num_experts)])
        if num_experts
        else mlp(),
        attention_norm=torch.rand(HIDDEN).to(dtype) if norms else None,
        head_norms=torch.rand(HEADS + KV_HEADS, DIM) if norms else None,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        eps=1e-5,
        window=window,
    )


def replaced(layer: Layer, **changes: Any) -> Layer:  # noqa: ANN401 # of several types
    """The layer with other values; the MLP's values go to its MLP."""
    assert isinstance(layer.mlp, DenseMlp)
    own = {name: changes.pop(name) for name in ("activation", "down_norm") if name in changes}
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **own), **changes)


def step(dtype: torch.dtype, trees: dict[int, Tree] | None = None) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """Residuals with a row of padding, rotations, a cache and the layout of a step."""
    torch.manual_seed(6)
    tables = np.arange(1, 1 + len(LENS) * 5, dtype=np.int32).reshape(len(LENS), 5)
    meta = AttentionMetadata.build(LENS, CONTEXTS, tables, BLOCK, CPU, trees or {})
    num = meta.num_tokens + 1
    shape = (len(LENS) * 5 + 1, BLOCK, 2, KV_HEADS)
    cache = torch.zeros(*shape, slot_width(DIM, dtype), dtype=dtype)
    if dtype is not torch.int8:  # whose zeros are zero, of scale zero
        cache.copy_(torch.randn(*shape, DIM))
    return (
        torch.randn(num, HIDDEN),
        torch.polar(torch.ones(num, 1, DIM // 2), torch.randn(num, 1, DIM // 2)),
        cache,
        meta,
    )


def both(
    layer: Layer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, trees: dict[int, Tree] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Residuals and cache after one call, and after the separate operations."""
    found = []
    for is_one in (True, False):
        h, cis, cache, meta = step(dtype, trees)
        assert one_call.is_one_call(layer, h, cache)
        with monkeypatch.context() as patched:
            if not is_one:
                patched.setattr(one_call, "is_one_call", lambda *given: False)
            one_call.decoder_layer_(h, layer, cis, cache, meta)
        found.append((h[: meta.num_tokens], cache))
    return found


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("form", FORMATS)
def test_one_call_computes_what_the_operations_do_to_the_bit(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bias, window in ((False, None), (True, 6)):
        one, other = both(make(form, bias=bias, window=window), dtype, monkeypatch)
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert float((one[0] - step(dtype)[0][:-1]).abs().mean()) > 0.1


@pytest.mark.parametrize(("form", "off"), [("float32", 1e-4), ("bfloat16", 1e-4), ("int8", 0.05), ("int4", 0.05)])
def test_norms_of_rows_and_of_heads(form: str, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With integers a sum in another order may end in another level of an activation."""
    one, other = both(make(form, norms=True), torch.float32, monkeypatch)
    assert torch.allclose(one[0], other[0], atol=off) and torch.allclose(one[1], other[1], atol=1e-5)


def test_activation_scale_and_cap_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = both(make("float32"), torch.float32, monkeypatch)[0][0]
    for changes in ({"activation": "gelu_tanh"}, {"score_scale": 0.6}, {"score_cap": 0.3}):
        layer = replaced(make("float32"), **changes)
        one, other = both(layer, torch.float32, monkeypatch)
        assert torch.equal(one[0], other[0])
        assert float((one[0] - plain).abs().mean()) > 1e-3


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_norms_of_what_is_added(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = both(make(form), torch.float32, monkeypatch)[0][0]
    for names in (["output_norm"], ["down_norm"], ["output_norm", "down_norm"]):
        layer = replaced(make(form), **{name: torch.rand(HIDDEN) for name in names})
        one, other = both(layer, torch.float32, monkeypatch)
        assert torch.allclose(one[0], other[0], atol=1e-4)
        assert float((one[0] - plain).abs().mean()) > 0.1


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_experts_are_part_of_the_call(form: str, norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = both(make(form, norms=norms, num_experts=5), torch.float32, monkeypatch)
    assert torch.allclose(one[0], other[0], atol=1e-4) if norms else torch.equal(one[0], other[0])
    assert float((one[0] - both(make(form, norms=norms), torch.float32, monkeypatch)[0][0]).abs().mean()) > 0.05


@pytest.mark.parametrize("kept", [[], [1, 4], [0, 1, 6, 9], list(range(10))])
@pytest.mark.parametrize(("form", "num_experts"), [("float32", 0), ("int8", 0), ("float32", 5), ("int4", 5)])
def test_tokens_that_are_wanted_come_first_as_they_would_among_all(
    form: str, num_experts: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(form, num_experts=num_experts)
    all_of_them = both(layer, torch.float32, monkeypatch)[0]
    for is_one in (True, False):
        h, cis, cache, meta = step(torch.float32)
        if not is_one:
            monkeypatch.setattr(one_call, "is_one_call", lambda *given: False)
        one_call.decoder_layer_(h, layer, cis, cache, meta, torch.tensor(kept, dtype=torch.int64))
        assert torch.equal(h[: len(kept)], all_of_them[0][kept]) and torch.equal(cache, all_of_them[1])


def test_trees_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {2: Tree((-1, 0, 0, 1, 1))}
    one, other = both(make("float32"), torch.float32, monkeypatch, trees)
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[0], both(make("float32"), torch.float32, monkeypatch)[0][0])


def test_what_has_no_kernel_is_computed_operation_by_operation() -> None:
    layer = make("int8")
    mlp = layer.mlp
    assert isinstance(mlp, DenseMlp)
    h, _, cache, _ = step(torch.float32)
    for changed in (
        dataclasses.replace(layer, mlp=dataclasses.replace(mlp, down=PackedLinear(torch.randn(HIDDEN, INNER), None))),
        dataclasses.replace(
            layer, mlp=pack_experts(ExpertRouter(PackedLinear(torch.randn(2, HIDDEN), None), 1, True), [mlp])
        ),
        dataclasses.replace(layer, dim=24),
        dataclasses.replace(layer, sinks=torch.zeros(HEADS)),
    ):
        assert not one_call.is_one_call(changed, h, cache)
    assert not one_call.is_one_call(layer, h.bfloat16(), cache)
    assert not one_call.is_one_call(layer, h, cache.half())
