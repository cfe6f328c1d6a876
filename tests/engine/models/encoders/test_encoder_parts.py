"""Layers of encoders part by part: by our kernels where they have all of it, else by operations, with equal results."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.encoders.layers import EncoderLayer, LayerNorm, RootNorm
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.cpu.native_encoders import EncoderPass
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packer import PLAIN

HIDDEN, INNER, TOKENS = 48, 80, 53
ENDS: Sequence[Sequence[int]] = ((), (7, 8, 40, 53))


def make(*, is_gated: bool) -> EncoderLayer:
    """A layer of random weights, packed as this machine does now."""
    torch.manual_seed(1)

    def linear(rows: int, width: int) -> PackedLinear:
        return PLAIN(torch.randn(rows, width) * width**-0.5, torch.randn(rows))

    weights = [torch.randn(HIDDEN) for _ in range(4)]
    return EncoderLayer(
        qkv=linear(3 * HIDDEN, HIDDEN),
        output=linear(HIDDEN, HIDDEN),
        up=linear(INNER * (1 + is_gated), HIDDEN),
        down=linear(HIDDEN, INNER),
        attention_norm=RootNorm(weights[0], 1e-6) if is_gated else LayerNorm(weights[0], weights[1], 1e-6),
        mlp_norm=RootNorm(weights[2], 1e-6) if is_gated else LayerNorm(weights[2], weights[3], 1e-6),
        heads=4,
        window=None,
        activation="silu" if is_gated else "gelu",
        is_gated=is_gated,
        is_pre_normed=True,
    )


def computed(layer: EncoderLayer, num: int, cis: Tensor | None, ends: Sequence[int]) -> Tensor:
    """The hidden states behind a layer, and how many parts of `num` rows it took."""
    h = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    assert sum(1 for _ in layer.parts(h, num, cis, ends)) == 2 * -(-TOKENS // num)
    return h


@pytest.fixture
def num_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of our kernels: the tokens of each."""
    seen: list[int] = []
    advance = EncoderPass.advance

    def counted(self: EncoderPass, first: int, last: int, runs: Sequence[tuple[int, int, int, int]]) -> None:
        seen.append(last - first)
        advance(self, first, last, runs)

    monkeypatch.setattr(EncoderPass, "advance", counted)
    return seen


@pytest.mark.parametrize("ends", ENDS, ids=["whole", "runs"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_kernels_and_operations_agree(
    is_gated: bool, ends: Sequence[int], num_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not builds.is_available():
        pytest.skip("installed without a C++ compiler")
    cis = torch.polar(torch.ones(TOKENS, 6), torch.randn(TOKENS, 6)) if is_gated else None
    layer = make(is_gated=is_gated)
    got = [computed(layer, num, cis, ends) for num in (64, 16, 5)]
    assert len(num_passes) == 1 + 4 + 11
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    monkeypatch.setattr(builds, "MODULE", None)
    assert torch.allclose(got[0], computed(make(is_gated=is_gated), 16, cis, ends), atol=1e-4)
    assert len(num_passes) == 1 + 4 + 11


def test_a_matrix_that_is_not_ours_keeps_a_layer_from_the_kernels(
    num_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(builds, "MODULE", None)
        layer = make(is_gated=False)
    want = computed(make(is_gated=False), 16, None, ())
    num_passes.clear()
    assert torch.allclose(computed(layer, 16, None, ()), want, atol=1e-4)
    assert not num_passes
