"""Kernels other than attention in bf16 and fp8 on a GPU: near their float64 references, reproducible to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats import packed_weights
from sluice_server.kernels.formats.planes import planes_of_4, planes_of_8
from sluice_server.kernels.formats.zero_points import round_groups
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.reference import definitions, sampling
from sluice_server.kernels.reference import moe as plain_moe
from sluice_server.kernels.reference.moe import ExpertStack
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.triton import activation, kv_write, linear4, linear8, linear8a16, linear16, moe, norm
from sluice_server.kernels.triton import sampling as sampler
from tests.kernels.cpu.test_native_sampling import TIE, score
from tests.kernels.triton.harness import assert_close

BF16 = torch.bfloat16
ROWS = [1, 2, 7, 16, 17, 64, 128, 1000]
WIDTHS = [(64, 128), (4096, 4096), (1000, 2048), (129, 14_336)]  # outputs, inputs


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


@pytest.mark.parametrize("width", [1, 63, 64, 111, 768, 4096, 5120, 16_384])
@pytest.mark.parametrize("tokens", [1, 19, 989])
def test_norms(tokens: int, width: int) -> None:
    x, weight = numbers(tokens, width), numbers(width, seed=1)
    x[0] = 0.0
    found = norm.rms_norm(x, weight, 1e-5)
    assert_close(found, definitions.rms_norm(x.double(), weight.double(), 1e-5).double(), BF16)
    residual = torch.randn(tokens, width, device="cuda")
    wanted = residual + x.float()
    found = norm.add_rms_norm_(residual, x, weight, 1e-5)
    assert torch.equal(residual, wanted)
    assert_close(found, definitions.rms_norm(wanted.double(), weight.double(), 1e-5).double(), BF16)


@pytest.mark.parametrize("width", [1, 111, 4096, 14_336])
def test_activation(width: int) -> None:
    gate_up = numbers(37, 2 * width) * 10
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(activation.silu_mul(gate_up), gate * gate.sigmoid() * up, BF16)


@pytest.mark.parametrize("kept", [BF16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("dim", "block"), [(64, 8), (80, 16), (128, 32), (256, 1)])
def test_rotation_and_write(dim: int, block: int, kept: torch.dtype) -> None:
    if kept is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    tokens, heads, keys = 42, 8, 2
    x = numbers(tokens, heads + 2 * keys, dim)
    angles = torch.rand(tokens, 1, dim // 2, device="cuda") * 100
    cis = torch.polar(torch.ones_like(angles), angles)
    num = -(-tokens // block) + 2
    places = torch.randperm(num * block, device="cuda")[:tokens]
    places[5] = -1  # nowhere
    width = slots.slot_width(dim, kept, slots.GPU_ALIGN)
    cache = new_layers(
        num, 3, block, keys, width, lambda shape: torch.zeros(shape, dtype=kept, device="cuda"), is_whole=True
    )
    wanted = definitions.rope_(x.double(), cis.to(torch.complex128))
    wanted[:, heads + keys :] = x[:, heads + keys :].double()
    kv_write.rotate_and_write(x, cis, *swapped(slots.parts(cache[1], dim), places))
    assert_close(x[:, :heads], wanted[:, :heads], BF16)
    kept_slots = slots.decode(cache[1], dim, torch.float32).reshape(-1, 2, keys, dim)
    is_written = places >= 0
    found, meant = kept_slots[places[is_written]], wanted[is_written, heads:].view(-1, 2, keys, dim)
    factor = {BF16: 1.0, torch.int8: 2.0, torch.float8_e4m3fn: 4.0}[kept]  # three bits
    assert_close(found, meant, BF16, factor)
    others = torch.ones(len(kept_slots), dtype=torch.bool, device="cuda")
    others[places[is_written]] = False
    assert not kept_slots[others].any() and not any(cache[i].view(torch.uint8).any() for i in (0, 2))


def swapped(cache: tuple[Tensor, Tensor | None], places: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return cache[0], places, cache[1]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
def test_linears_over_rounded_weights(outputs: int, inputs: int, rows: int) -> None:
    x, weight, bias = numbers(rows, inputs), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    eight = packed_weights.quantise_rows(weight, torch.int8)
    wanted = x.double() @ (eight.weight.double() * eight.scales.double()[:, None]).t() + bias.double()
    found = linear8a16.linear_w8a16(x, planes_of_8(eight), bias)
    assert_close(found, wanted, BF16)
    assert torch.equal(found, linear8a16.linear_w8a16(x, planes_of_8(eight), bias))
    four = round_groups(weight)
    found = linear4.linear_w4a16(x, planes_of_4(four), bias)
    assert_close(found, x.double() @ packed_weights.dequantise(four).double().t() + bias.double(), BF16)
    assert torch.equal(found, linear4.linear_w4a16(x, planes_of_4(four), bias))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_linears_over_8_bits_on_both_sides(kind: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    if kind is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    x, packed = numbers(rows, inputs), packed_weights.quantise_rows(numbers(outputs, inputs, seed=1), kind)
    own = linear8.quantise_rows(x, kind)
    wanted = own.weight.double() @ packed.weight.double().t() * packed.scales.double() * own.scales.double()[:, None]
    found = linear8.linear_w8a8(x, packed)
    assert_close(found, wanted, BF16)
    assert torch.equal(found, linear8.linear_w8a8(x, packed))


@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
def test_linears_of_one_order(outputs: int, inputs: int) -> None:
    """Near the represented numbers; a row has the same bits alone, in a few and in many."""
    x, weight, bias = numbers(1000, inputs), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    eight, four = packed_weights.quantise_rows(weight, torch.int8), round_groups(weight)
    whole = linear16.linear(x, weight, bias)
    assert_close(whole, x.double() @ weight.double().t() + bias.double(), BF16)
    applied: dict[str, Callable[[Tensor], Tensor]] = {
        "16": lambda x: linear16.linear(x, weight, bias),
        "w8a16": lambda x: linear8a16.linear_w8a16(x, planes_of_8(eight), bias, is_fixed=True),
        "w8a8": lambda x: linear8.linear_w8a8(x, eight, bias, is_fixed=True),
        "w4a16": lambda x: linear4.linear_w4a16(x, planes_of_4(four), bias, is_fixed=True),
    }
    for name, apply in applied.items():
        whole = apply(x)
        for rows in (slice(0, 1), slice(999, 1000), slice(60, 77), slice(100, 600)):
            assert torch.equal(apply(x[rows].contiguous()), whole[rows]), (name, rows)


@pytest.mark.parametrize("tokens", [0, 1, 33, 222, 1024])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (8, 2), (60, 6), (256, 8)])
def test_experts(experts: int, chosen: int, tokens: int) -> None:
    x = numbers(tokens, 256)
    gate_up, down = numbers(experts, 192, 256, seed=1) / 16, numbers(experts, 256, 96, seed=2) / 10
    choice = torch.rand(tokens, experts, device="cuda").argsort(dim=1)[:, :chosen]
    shares = torch.rand(tokens, chosen, device="cuda").softmax(1)
    wanted = plain_moe.experts_mlp(x.float(), ExpertStack(gate_up.float()), ExpertStack(down.float()), choice, shares)
    found = moe.experts_mlp(x, ExpertStack(gate_up), ExpertStack(down), choice, shares)
    assert_close(found, wanted.double(), BF16)
    assert torch.equal(found, moe.experts_mlp(x, ExpertStack(gate_up), ExpertStack(down), choice, shares))


@pytest.mark.parametrize("vocab", [111, 32_000, 128_256])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 0.95, 0.0), (1.2, 0, 0.5, 0.05), (0.7, 1, 1.0, 0.0)],
)
def test_draws_are_those_of_the_cpu(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Unless two scores nearly tie."""
    num = 19
    logits = torch.randn(num, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    heat, mass, least, all_of_it = (torch.full((num,), value) for value in (temperature, top_p, min_p, 1.0))
    counts = torch.arange(num)
    kept = torch.full((num,), top_k)
    rows = Rows(heat, kept, mass, least, all_of_it, counts, counts, torch.zeros_like(counts))
    ids, bad = sampler.sample(logits.cuda(), Rows(*(column.cuda() for column in rows)))
    expected, expected_bad = sampling.sample(logits, rows)
    assert torch.equal(bad.cpu(), expected_bad)
    for row in (ids.cpu() != expected).nonzero()[:, 0].tolist():
        scores = [score(logits, rows, row, int(found[row])) for found in (ids, expected)]
        assert abs(scores[0] - scores[1]) < TIE
