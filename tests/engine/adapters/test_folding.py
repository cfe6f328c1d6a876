"""What is added beside a packed linear is what packing the merged weight would have changed."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.adapters.folding import fold
from sluice_server.engine.models.layers.decoder import pair_order
from sluice_server.engine.models.layers.loader import LayerLoader
from sluice_server.engine.models.spans import Shape, whole_of
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear

WIDTH, QUERIES, KEYS, DIM = 48, 64, 32, 16
PARTS = [("q", QUERIES), ("k", KEYS), ("v", KEYS)]
ORDERS = {"q": pair_order(QUERIES, DIM), "k": pair_order(KEYS, DIM)}
MLP = [("gate", 88), ("up", 88)]


class Weights:
    """A source of given weights."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values

    def get(self, name: str, shape: Shape) -> Tensor:
        found = self.values[name]
        assert tuple(found.shape) == whole_of(shape)
        return found

    def stored(self, name: str, rows: object, width: object) -> None:
        return None

    def stored_experts(self, name: str, shape: object) -> None:
        return None

    def has(self, name: str) -> bool:
        return name in self.values


class AsPacked:
    """Packs nothing: the weight of a layer is what would be packed."""

    rounds = weighs = False

    def __call__(self, weight: Tensor, bias: Tensor | None = None, **_: object) -> PackedLinear:
        return PackedLinear(weight, bias)


def random_part(rows: int, rank: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, WIDTH, generator=generator), torch.randn(rows, rank, generator=generator)
    return LowRank(a, b, 0.5 + seed)


def weights_of(parts: list[tuple[str, int]], adapter: Mapping[str, LowRank]) -> Weights:
    """The base's weights, or those merged with an adapter's, and a norm."""
    generator = torch.Generator().manual_seed(7)
    values = {"norm.weight": torch.rand(WIDTH, generator=generator) + 0.5}
    for name, rows in parts:
        weight = torch.randn(rows, WIDTH, generator=generator)
        one = adapter.get(name)
        values[f"{name}.weight"] = weight if one is None else weight + one.scale * (one.b @ one.a)
    return Weights(values)


SUBSETS = [subset for num in (1, 2, 3) for subset in itertools.combinations(PARTS, num)]


@pytest.mark.parametrize("changed", SUBSETS, ids=["".join(name for name, _ in one) for one in SUBSETS])
def test_queries_keys_and_values(changed: tuple[tuple[str, int], ...]) -> None:
    """Ranks differ; rows of rotated heads are permuted; the norm is folded in."""
    adapter = {name: random_part(rows, 3 + i, i) for i, (name, rows) in enumerate(changed)}
    packed = []
    for merged in ({}, adapter):
        loader = LayerLoader(weights_of(PARTS, merged), torch.float32, AsPacked())
        norm = loader.norm("norm", WIDTH)
        assert loader.kept(norm) is None
        packed.append(loader.linear(PARTS, WIDTH, norm=norm, orders=ORDERS).weight)
    side = fold(PARTS, adapter, norm=norm, orders=ORDERS)
    assert side is not None
    added = side.add_to(torch.zeros(WIDTH, len(packed[0])), torch.eye(WIDTH))
    torch.testing.assert_close(added.t(), packed[1] - packed[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", [("gate",), ("up",), ("gate", "up")])
def test_a_product_beside_gate_and_up(changed: tuple[str, ...]) -> None:
    """Halves of a dtype that is not float32, and no norm folded in; the gate is of the sum."""
    adapter = {}
    for i, name in enumerate(changed):
        one = random_part(88, 2 + i, i)
        adapter[name] = LowRank(one.a.bfloat16(), one.b.bfloat16(), one.scale)
    whole = {name: LowRank(one.a.float(), one.b.float(), one.scale) for name, one in adapter.items()}
    base, merged = (
        LayerLoader(weights_of(MLP, one), torch.float32, AsPacked()).linear(MLP, WIDTH, gated=True)
        for one in ({}, whole)
    )
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3))
    side = fold(MLP, adapter)
    assert side is not None
    found, wanted = side.add_to(base.apply(x), x), merged.apply(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.gate(found, "silu"), ops.gate(wanted, "silu"), rtol=1e-3, atol=1e-2)


def test_an_adapter_of_other_projections_adds_nothing() -> None:
    assert fold(MLP, {"q": random_part(QUERIES, 3, 0)}) is None
