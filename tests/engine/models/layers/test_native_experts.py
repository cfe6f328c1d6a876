"""Experts as one call of the C++ kernels against the same experts one by one."""

import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.layers.experts import ExpertRouter, NativeExperts, SeparateExperts, pack_experts
from sluice_server.engine.models.layers.mlp import DenseMlp
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.integer_linear import integer_linear
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.quantised import QuantisedWeight, round_weight
from sluice_server.kernels.reference.elementwise import GATES
from tests.kernels.cpu.native import kernels_of
from tests.kernels.test_ops import threads_of

HIDDEN, INNER, EPS = 80, 112, 1e-5
FORMATS = ["float32", "bfloat16", "int8", "int8 affine", "int4", "int4 symmetric"]


@pytest.fixture(params=builds.KNOWN, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the kernels of each instruction set that this machine has."""
    monkeypatch.setattr(builds, "MODULE", kernels_of(request.param))
    monkeypatch.setattr("sluice_server.kernels.formats.weight_formats.computes_bfloat16", lambda: False)


def pack(rows: int, inputs: int, form: str, *, bias: bool = False, gated: bool = False) -> PackedLinear:
    weight, vector = torch.randn(rows, inputs) * inputs**-0.5, torch.randn(rows) if bias else None
    if form.startswith("int"):
        found = round_weight(weight, int(form[3]))
        low = found.scales * -float(1 << found.bits - 1)
        minima = {"int8 affine": low, "int4": found.minima}.get(form)
        return integer_linear(QuantisedWeight(found.bits, found.levels, found.scales, minima), vector, gated)
    return weight_formats.pack(weight, vector, gated=gated, weights=form)


def experts(
    form: str = "float32", num: int = 6, *, bias: bool = False, norm: bool = False, activation: str = "silu"
) -> list[DenseMlp]:
    """Experts of random weights behind one norm."""
    torch.manual_seed(5)
    norms = torch.rand(HIDDEN) if norm else None
    return [
        DenseMlp(
            pack(2 * INNER, HIDDEN, form, bias=bias, gated=True),
            pack(HIDDEN, INNER, form, bias=bias),
            norms,
            activation,
        )
        for _ in range(num)
    ]


def make(
    each: list[DenseMlp], per_token: int = 2, *, renormalises: bool = True, logits: Tensor | None = None
) -> NativeExperts:
    """Experts behind a router of random weights, or with the same `logits` for every token."""
    weight = torch.randn(len(each), HIDDEN) if logits is None else torch.zeros(len(each), HIDDEN)
    found = pack_experts(ExpertRouter(weight_formats.pack(weight, logits), per_token, renormalises), each)
    assert isinstance(found, NativeExperts)
    return found


def rows(num: int) -> Tensor:
    torch.manual_seed(6)
    return torch.randn(num, HIDDEN)


def one_by_one(mlp: NativeExperts, h: Tensor) -> Tensor:
    return SeparateExperts(mlp._router, mlp._each).add_to(h.clone(), EPS)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("num", "per_token"), [(4, 1), (4, 4), (6, 2), (17, 3), (64, 8)])
def test_the_sum_is_that_of_experts_one_by_one(form: str, num: int, per_token: int) -> None:
    for renormalises in (True, False):
        mlp = make(experts(form, num), per_token, renormalises=renormalises)
        for count in (*range(1, 41, 3), 40, 300):
            h = rows(count)
            found, want = mlp.add_to(h.clone(), EPS), one_by_one(mlp, h)
            assert torch.allclose(found, want, rtol=1e-5, atol=1e-5), (count, renormalises)
        assert float((want - h).abs().mean()) > 0.03


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm", [False, True])
def test_shares_of_one_half_give_the_same_bits(form: str, norm: bool) -> None:
    """And of a single expert: products are those of a dense layer, and of equal experts the first are chosen."""
    for per_token, logits in ((1, None), (2, torch.zeros(4))):
        mlp = make(experts(form, 4, bias=True, norm=norm), per_token, logits=logits)
        for count in (1, 2, 7, 33, 300, 1027):  # the last ones are a second pass
            h = rows(count)
            assert torch.equal(mlp.add_to(h.clone(), EPS), one_by_one(mlp, h)), (per_token, count)


@pytest.mark.parametrize("form", ["float32", "int4"])
@pytest.mark.parametrize("activation", list(GATES))
def test_biases_gates_and_norms(form: str, activation: str) -> None:
    mlp, plain = (make(experts(form, bias=bias, norm=True, activation=activation)) for bias in (True, False))
    h = rows(9)
    found = mlp.add_to(h.clone(), EPS)
    assert torch.allclose(found, one_by_one(mlp, h), rtol=1e-5, atol=1e-5)
    assert float((found - plain.add_to(h.clone(), EPS)).abs().mean()) > 0.1


@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_all_rows_and_of_none(form: str) -> None:
    """A hundred rows and more are several pieces of one expert, beside experts of few."""
    h, logits = rows(200), torch.tensor([0.0, 0.0, 50.0, -50.0, 0.0, 0.0])
    mlp = make(experts(form), 3)
    mlp._router.linear.bias = logits
    assert torch.allclose(mlp.add_to(h.clone(), EPS), one_by_one(mlp, h), rtol=1e-5, atol=1e-5)
    chosen, _ = mlp._router.choose(ops.linear_normed(h, None, EPS, mlp._router.linear))
    assert chosen.flatten().bincount(minlength=6)[[2, 3]].tolist() == [200, 0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_depends_on_itself_alone(form: str) -> None:
    """Neither on other rows, of which one is broken, nor on threads."""
    mlp, h = make(experts(form, 16), 4), rows(300)
    h[2] = float("nan")
    with threads_of(2):
        whole = mlp.add_to(h.clone(), EPS)
    assert whole[2].isnan().all() and whole[:2].isfinite().all() and whole[3:].isfinite().all()
    for first, last in ((0, 1), (3, 4), (5, 10), (3, 40), (100, 300)):
        with threads_of(1):
            assert torch.equal(mlp.add_to(h[first:last].clone(), EPS), whole[first:last]), (first, last)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_logits_choose_the_first(value: float) -> None:
    logits = torch.zeros(6)
    logits[4] = value
    mlp, h = make(experts(), logits=logits), rows(3)
    found, want = mlp.add_to(h.clone(), EPS), one_by_one(mlp, h)
    assert torch.allclose(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found.isnan().all() == (value != -float("inf"))


def test_no_rows_are_no_work() -> None:
    assert make(experts()).add_to(torch.empty(0, HIDDEN), EPS).shape == (0, HIDDEN)


def test_experts_that_differ_in_format_are_computed_one_by_one() -> None:
    mlp = make(experts("int8"))
    other, unknown = make(experts()), PackedLinear(torch.randn(6, HIDDEN), None)
    assert isinstance(pack_experts(mlp._router, [mlp._each[0], other._each[1]]), SeparateExperts)
    assert isinstance(pack_experts(ExpertRouter(unknown, 2, True), mlp._each), SeparateExperts)
