"""Experts: their choice, independence of a token's numbers from other tokens, and equality of both forms."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sluice_server.engine.models.layers import experts
from sluice_server.engine.models.layers.experts import (
    ExpertRouter,
    NativeExperts,
    SeparateExperts,
    StackedExperts,
    pack_experts,
)
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.kernels import gpu, ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu, Int4OnGpu, Int8OnGpu
from sluice_server.kernels.formats.gpu_plain import PlainOnGpu
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packed_weights import quantise_rows
from sluice_server.kernels.reference import moe
from tests.engine.worker.host_device import reference_family
from tests.kernels.cpu.native import kernels_of
from tests.kernels.test_ops import threads_of

HIDDEN, INNER, NUM, PER_TOKEN, EPS = 48, 40, 6, 2, 1e-5
FORMATS = ["float32", "bfloat16", "int8", "int4"]


@pytest.fixture(params=[*builds.KNOWN, "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with our kernels of each instruction set of this machine, and without."""
    name: str = request.param
    module = None if name == "torch" else kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    monkeypatch.setattr("sluice_server.kernels.formats.weight_formats.computes_bfloat16", lambda: False)
    return name


def weights(seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    """The random weights of each expert: gate and up, and down."""
    torch.manual_seed(seed)
    return [(torch.randn(2 * INNER, HIDDEN) / 7, torch.randn(HIDDEN, INNER) / 6) for _ in range(NUM)]


def make(form: str = "float32", *, norm: Tensor | None = None, num: int = PER_TOKEN) -> Mlp:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32

    def pack(weight: Tensor, *, gated: bool = False) -> PackedLinear:
        return weight_formats.pack(weight.to(dtype), gated=gated, weights=form)

    each = [DenseMlp(pack(gate_up, gated=True), pack(down), norm) for gate_up, down in weights()]
    return pack_experts(ExpertRouter(weight_formats.pack(torch.randn(NUM, HIDDEN).to(dtype)), num, True), each)


def tokens(num: int = 64) -> Tensor:
    torch.manual_seed(6)
    return torch.randn(num, HIDDEN)


@pytest.mark.parametrize("renormalises", [True, False])
def test_the_likeliest_are_chosen_and_shares_follow_the_softmax(renormalises: bool) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 5.0, float("-inf")]])
    experts, shares = ops.route(logits, 2, renormalises=renormalises)
    assert experts.tolist() == [[1, 3], [0, 2]]
    wanted = logits.double().softmax(1).gather(1, experts)
    wanted = wanted / wanted.sum(1, keepdim=True) if renormalises else wanted
    assert torch.allclose(shares.double(), wanted) and shares.dtype is torch.float32


@pytest.mark.parametrize("num", [6, 60, 300])
def test_of_experts_that_are_alike_the_first_are_chosen(num: int) -> None:
    """For any number of experts, and for rows in which some experts are equal."""
    logits = torch.zeros(3, num)
    logits[1, num // 2 :], logits[2, 1::2] = 1.0, -1.0
    experts, _ = ops.route(logits, 3, renormalises=True)
    assert experts.tolist() == [[0, 1, 2], [num // 2 + i for i in range(3)], [0, 2, 4]]


def test_a_row_of_nan_chooses_valid_experts_and_changes_no_other() -> None:
    h = tokens(5)
    h[2] = float("nan")
    whole, alone = make().add_to(h.clone(), EPS), make().add_to(h[:2].clone(), EPS)
    assert whole[2].isnan().all() and torch.equal(whole[:2], alone) and whole[3:].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num", [1, 2, 6])
def test_no_bit_depends_on_company(form: str, num: int, kernels: str) -> None:
    """The bits do not depend on other tokens of the same expert, the number and order of tokens, or threads."""
    mlp, h = make(form, num=num), tokens()
    with threads_of(2):
        whole = mlp.add_to(h.clone(), EPS)
    for first, last in ((0, 1), (3, 4), (5, 10), (0, 33), (40, 64)):
        with threads_of(1):
            assert torch.equal(mlp.add_to(h[first:last].clone(), EPS), whole[first:last]), (first, last)
    order = torch.randperm(64)
    assert torch.equal(mlp.add_to(h[order], EPS), whole[order])


@pytest.mark.parametrize("norm", [None, torch.linspace(0.5, 1.5, HIDDEN)])
def test_single_experts_compute_what_the_reference_does(norm: Tensor | None, kernels: str) -> None:
    mlp, h = make(norm=norm), tokens(9)
    assert isinstance(mlp, SeparateExperts if kernels == "torch" else NativeExperts)
    assert torch.allclose(mlp.add_to(h.clone(), EPS), wanted(mlp._router, norm, h), atol=1e-4)


def wanted(router: ExpertRouter, norm: Tensor | None, h: Tensor) -> Tensor:
    """The result by definition: each token's experts one after the other."""
    x = ops.rms_norm(h, norm, EPS)
    experts, shares = router.choose(ops.linear(torch.cat([x, x[:4]]), router.linear)[: len(x)])
    found = h.clone()
    for token in range(len(h)):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            gate_up, down = weights()[expert]
            gate, up = (gate_up @ x[token]).chunk(2)
            found[token] += share * (down @ (gate * gate.sigmoid() * up))
    return found


@pytest.mark.parametrize("form", [PlainOnGpu, Int8OnGpu])
@pytest.mark.parametrize("is_reference", [True, False])
def test_stacked_experts_compute_the_same(
    form: type[PlainOnGpu], is_reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reference implementations, and by the interpreted Triton kernels."""
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    if is_reference:
        monkeypatch.setattr(gpu, "family", reference_family)
    mlp, h = stacked(form), tokens(9)
    assert isinstance(mlp, StackedExperts)
    limit = 1e-4 if form is PlainOnGpu else 0.05
    assert torch.allclose(mlp.add_to(h.clone(), EPS), wanted(mlp.router, mlp.norm, h), atol=limit)


@pytest.mark.parametrize("form", [PlainOnGpu, Int8OnGpu])
@pytest.mark.parametrize("is_reference", [True, False])
def test_biases_and_another_gate(form: type[PlainOnGpu], is_reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked experts give the result of single ones."""

    def each(pack: Callable[..., PackedLinear]) -> list[DenseMlp]:
        torch.manual_seed(8)
        biases = [(torch.randn(2 * INNER), torch.randn(HIDDEN)) for _ in range(NUM)]
        pairs = zip(weights(), biases, strict=True)
        return [DenseMlp(pack(g, b, gated=True), pack(d, c), None, "clamped") for (g, d), (b, c) in pairs]

    torch.manual_seed(9)
    weight, bias, h = torch.randn(NUM, HIDDEN), torch.randn(NUM), tokens(5)
    apart = pack_experts(ExpertRouter(weight_formats.pack(weight, bias), PER_TOKEN, True), each(weight_formats.pack))
    found = apart.add_to(h.clone(), EPS)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    if is_reference:
        monkeypatch.setattr(gpu, "family", reference_family)
    together = pack_experts(
        ExpertRouter(PlainOnGpu(weight, bias), PER_TOKEN, True), each(lambda w, b, gated=False: form(w, b))
    )
    assert torch.allclose(together.add_to(h.clone(), EPS), found, atol=1e-4 if form is PlainOnGpu else 0.1)
    assert float((found - h).abs().mean()) > 0.3


def test_many_tokens_are_left_to_the_library_unless_all_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)
    made, used = stacked(PlainOnGpu), list[int]()
    assert isinstance(made, StackedExperts) and made.library_tokens is None
    mlp = dataclasses.replace(made, library_tokens=5)

    def by_library(x: Tensor, *given: Any) -> Tensor:  # noqa: ANN401 # of several types
        used.append(len(x))
        return torch.zeros_like(x)

    monkeypatch.setattr(experts, "experts_by_library", by_library)
    for num in (4, 5, 6):
        assert torch.equal(mlp.add_to(tokens(num), EPS), tokens(num)) is (num >= 5)
        fixed = dataclasses.replace(mlp, is_fixed=True)
        assert not torch.equal(fixed.add_to(tokens(num), EPS), tokens(num))
    assert used == [5, 6]


def stacked(form: type[PlainOnGpu]) -> Mlp:
    norm = torch.linspace(0.5, 1.5, HIDDEN)
    each = [DenseMlp(form(gate_up, None), form(down, None), norm) for gate_up, down in weights()]
    return pack_experts(ExpertRouter(PlainOnGpu(torch.randn(NUM, HIDDEN), None), PER_TOKEN, True), each)


class NoHostSync(TorchDispatchMode):
    """A mode that fails at any op which makes the host wait for a value of the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # has no types

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:  # noqa: ANN401 # torch's own
        name = str(call)
        assert not any(one in name for one in ("_local_scalar_dense", "nonzero", "unique", "masked_select")), name
        return call(*given, **(named or {}))


def test_no_choice_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op waits, so that a step can be recorded: neither in torch's operators nor around our kernels."""
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    mlp, h = stacked(PlainOnGpu), tokens(1)
    with NoHostSync():
        mlp.add_to(h, EPS)
    monkeypatch.setattr(gpu, "family", lambda name: moe if name == "moe" else reference_family(name))
    with pytest.raises(AssertionError, match=r"nonzero|_local_scalar"), NoHostSync():  # the reference does
        mlp.add_to(h, EPS)


def test_what_no_kernel_multiplies_is_refused() -> None:
    norm, (gate_up, down) = torch.ones(HIDDEN), weights()[0]
    eight = [EightBitsOnGpu(quantise_rows(one, torch.int8), None, torch.float32) for one in (gate_up, down)]
    router = ExpertRouter(PlainOnGpu(torch.randn(NUM, HIDDEN), None), PER_TOKEN, True)
    four = [Int4OnGpu(one, None, torch.float32) for one in (gate_up, down)]
    for one, other in (eight, four, (PlainOnGpu(gate_up, None), eight[1])):
        with pytest.raises(ValueError, match="no kernel takes experts of"):
            pack_experts(router, [DenseMlp(one, other, norm)])
