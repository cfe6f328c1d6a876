"""Norms, activations and layers of encoders by the C++ kernels of each instruction set, against torch's operators."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds, native_encoders
from sluice_server.kernels.cpu.native_encoders import EncoderCall, EncoderPass, Run, norm_numbers
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.linear import NativeLinear
from sluice_server.kernels.reference import elementwise, encoders
from tests.kernels.cpu.native import kernels_of


@pytest.fixture(params=builds.KNOWN, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs every test with our kernels of each instruction set of this machine."""
    module = kernels_of(request.param)
    monkeypatch.setattr(builds, "MODULE", module)
    yield
    module.set_threads(1)


@pytest.mark.parametrize("name", list(encoders.ACTIVATIONS))
def test_activations_are_those_of_torch(name: str) -> None:
    """Small and large numbers of both signs, zero and NaN; beside others and alone."""
    x = torch.cat([torch.randn(3, 45), torch.linspace(-90.0, 90.0, 45)[None], torch.logspace(-9, 1, 45)[None]])
    x[0, :4] = torch.tensor([0.0, float("nan"), -0.0, float("inf")])
    want = encoders.ACTIVATIONS[name](x.double()).float()
    got = ops.activate(x, name)
    assert torch.allclose(got, want, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert x[0, 3] == float("inf"), "changes its input"
    for row, column in itertools.product(range(len(x)), (0, 17, 44)):
        one = ops.activate(x[row, column : column + 1].view(1, 1), name)
        assert torch.equal(one[0].nan_to_num(7.0), got[row, column : column + 1].nan_to_num(7.0))


@pytest.mark.parametrize("width", [1, 15, 16, 48, 100, 1152])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_are_those_of_torch(width: int, has_bias: bool) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(7, width) * 3 + 40, torch.randn(width), torch.randn(width) if has_bias else None
    got, want = ops.layer_norm(x, weight, bias, 1e-5), encoders.layer_norm(x, weight, bias, 1e-5)
    assert torch.allclose(got, want, atol=2e-4 if width > 1 else 1e-6)
    assert torch.equal(ops.layer_norm(x[3:4], weight, bias, 1e-5), got[3:4])


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of random weights, for the kernels and by operations of torch and linears."""

    linears: list[NativeLinear]
    vectors: list[Tensor]  # weight and bias of both norms
    heads: int
    activation: str
    is_gated: bool
    is_root: bool

    @property
    def numbers(self) -> tuple[float, ...]:
        """The layer as the kernels take it; valid while it lives."""
        each, width = [norm_numbers(*self._vectors(at), 1e-6, is_root=self.is_root) for at in (0, 2)], self.hidden
        own = tuple(number for one in self.linears for number in (*one.arguments, 0))
        call = EncoderCall(own, (*each[0], *each[1]), self.activation, self.is_gated, self.heads, width // self.heads)
        return call.numbers

    @property
    def hidden(self) -> int:
        """Numbers of a token."""
        return len(self.vectors[0])

    def by_operation(self, h: Tensor, cis: Tensor | None, runs: Sequence[Run]) -> Tensor:
        """The hidden states behind the layer."""
        q, k, v = self.linears[0].apply(self._norm(h, 0)).view(len(h), 3, self.heads, -1).unbind(1)
        if cis is not None:
            q, k = encoders.rotate_halves(q, cis), encoders.rotate_halves(k, cis)
        seen = [encoders.attend_all(q[begin:end], k[low:high], v[low:high]) for begin, end, low, high in runs]
        h = h + self.linears[1].apply(torch.cat(seen))
        first, *second = self.linears[2].apply(self._norm(h, 2)).chunk(2 if self.is_gated else 1, dim=-1)
        active = encoders.ACTIVATIONS[self.activation](first)
        return h + self.linears[3].apply(active * second[0] if second else active)

    def _norm(self, x: Tensor, at: int) -> Tensor:
        weight, bias = self._vectors(at)
        return elementwise.rms_norm(x, weight, 1e-6) if bias is None else encoders.layer_norm(x, weight, bias, 1e-6)

    def _vectors(self, at: int) -> tuple[Tensor, Tensor | None]:
        return self.vectors[at], None if self.is_root else self.vectors[at + 1]


def make(
    hidden: int, heads: int, activation: str, *, is_gated: bool = False, weights: str = "", steep: float = 1.0
) -> Layer:
    """A layer; one with gates has norms by the root of the mean square. Its scores are larger by `steep`."""
    torch.manual_seed(2)
    inner, linears = 88, list[NativeLinear]()
    sizes = ((3 * hidden, hidden), (hidden, hidden), (inner * (1 + is_gated), hidden), (hidden, inner))
    for rows, width in sizes:
        weight = torch.randn(rows, width) * width**-0.5
        if not linears:
            weight[:hidden] *= steep
        one = weight_formats.pack(weight, torch.randn(rows), weights=weights)
        assert isinstance(one, NativeLinear)
        linears.append(one)
    return Layer(linears, [torch.randn(hidden) for _ in range(4)], heads, activation, is_gated, is_root=is_gated)


def computed(layer: Layer, h: Tensor, cis: Tensor | None, runs: Sequence[Run], num: int) -> Tensor:
    """The hidden states behind the layer by kernels, `num` tokens at a time."""
    h = h.clone()
    one, parts = EncoderPass(layer.numbers, h, layer.heads), torch.arange(len(h)).split(num)
    for part in parts:
        one.project(int(part[0]), int(part[-1]) + 1, cis)
    for part in parts:
        first, last = int(part[0]), int(part[-1]) + 1
        own = [(max(begin, first), min(end, last), low, high) for begin, end, low, high in runs]
        one.advance(first, last, [run for run in own if run[0] < run[1]])
    return h


RUNS = {
    "one token": [(0, 1, 0, 1)],
    "all see all": [(0, 97, 0, 97)],
    "more than a piece": [(0, 150, 0, 150)],
    "windows": [(0, 5, 0, 5), (5, 69, 5, 69), (69, 70, 69, 70), (70, 101, 70, 101)],
}


@pytest.mark.parametrize(("hidden", "heads"), [(48, 4), (64, 2), (144, 2), (80, 1), (288, 2)])
@pytest.mark.parametrize("runs", RUNS.values(), ids=list(RUNS))
def test_a_layer_equals_its_operations(hidden: int, heads: int, runs: list[Run]) -> None:
    """Heads of 12, 32, 72, 80 and 144 numbers, turned and not, gated and not, and in any parts with the same bits."""
    tokens, pairs = runs[-1][1], hidden // heads // 2
    h, cis = torch.randn(tokens, hidden) * 2, torch.polar(torch.ones(tokens, pairs), torch.randn(tokens, pairs))
    for turned, is_gated, activation in ((None, False, "quick_gelu"), (cis, True, "silu"), (cis, False, "gelu")):
        layer = make(hidden, heads, activation, is_gated=is_gated)
        got = computed(layer, h, turned, runs, tokens)
        assert torch.allclose(got, layer.by_operation(h, turned, runs), atol=1e-4), activation
        for num, threads in ((1, 1), (40, 2), (tokens, 3)):
            builds.set_threads(threads)
            assert torch.equal(computed(layer, h, turned, runs, num), got), (activation, num)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_layer_of_rounded_weights_equals_its_operations(weights: str) -> None:
    runs, h = RUNS["all see all"], torch.randn(97, 64)
    layer = make(64, 2, "gelu", weights=weights)
    got, want = computed(layer, h, None, runs, 97), layer.by_operation(h, None, runs)
    assert float((got - want).norm() / want.norm()) < 0.02  # activations near a tie are rounded to either side


def test_scores_that_are_far_apart_are_weighed() -> None:
    """Scores of thousands, whose powers would be infinite or lost."""
    runs, h = RUNS["windows"], torch.randn(101, 64)
    layer = make(64, 2, "relu", steep=1000.0)
    got = computed(layer, h, None, runs, 101)
    assert torch.allclose(got, layer.by_operation(h, None, runs), atol=2e-3)


def test_kernels_that_were_built_before_do_not_take_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 16)
    assert native_encoders.takes(x)
    assert not native_encoders.takes(x.bfloat16()) and not native_encoders.takes(x.t())
    monkeypatch.setattr(builds, "MODULE", object())
    assert not native_encoders.takes(x)
