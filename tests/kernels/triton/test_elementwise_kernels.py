"""Norms, activation, embedding, copies of blocks and a step's inputs: against their references in float64."""

import random

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.formats import linear
from sluice_server.kernels.reference import definitions, elementwise, inputs
from sluice_server.kernels.triton import activation, embedding, norm
from sluice_server.kernels.triton import inputs as input_kernels
from tests.kernels.triton.harness import GUARD, Guarded, assert_close, caught, is_poison, poisoned

DTYPES = [torch.float32, torch.float16]


def numbers(*shape: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    """A view into poison, so that there is NaN between its rows."""
    torch.manual_seed(sum(shape))
    whole = poisoned((*shape[:-1], shape[-1] + 3), dtype)
    view = whole[..., : shape[-1]]
    view.copy_(torch.randn(shape) * scale)
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (19, 64), (3, 111), (33, 128), (2, 5120), (2, 16_384)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = caught(monkeypatch, norm)
    x, weight = numbers(rows, width, dtype=dtype), torch.randn(width).to(dtype)
    x[0] = 0.0  # a row of zeros stays one
    x[-1, 0] = 1e4  # whose square no float16 holds
    norm.rms_norm(x, weight, 1e-6)
    assert_close(made[0].check(), definitions.rms_norm(x.double(), weight.double(), 1e-6).double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_have_a_weight_each_and_may_have_none(dtype: torch.dtype) -> None:
    x, weight = numbers(5, 6, 64, dtype=dtype)[:, :3], torch.randn(3, 64)
    y = norm.rms_norm(x, weight, 1e-5, torch.float32)
    assert_close(y, definitions.rms_norm(x.double(), weight.double(), 1e-5).double(), dtype)
    assert_close(norm.rms_norm(x, None, 1e-5), definitions.rms_norm(x.double(), None, 1e-5).double(), dtype)
    assert norm.rms_norm(x[:0], weight, 1e-5).shape == (0, 3, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [63, 1024])
def test_the_norm_of_a_sum_leaves_the_sum(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = caught(monkeypatch, norm)
    x, weight = numbers(9, width, dtype=dtype), torch.randn(width)
    residual = Guarded.of((9, width), torch.float32)
    residual.tensor.copy_(torch.randn(9, width))
    expected = residual.tensor.clone()
    wanted = elementwise.add_rms_norm_(expected, x, weight, 1e-6)
    norm.add_rms_norm_(residual.tensor, x, weight, 1e-6)
    assert torch.equal(residual.check(), expected) and wanted.dtype is dtype
    assert_close(made[0].check(), definitions.rms_norm(expected.double(), weight.double(), 1e-6).double(), dtype)


def test_rows_that_no_program_could_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 16384 numbers"):
        norm.rms_norm(torch.zeros(1, 16_385), None, 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        norm.add_rms_norm_(torch.zeros(4, 4).t(), torch.zeros(4, 4), None, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 111), (2, 3000)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = caught(monkeypatch, activation)
    gate_up = numbers(rows, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[-1, width - 1], gate_up[-1, -1] = -6e4, 6e4, 0.5  # e^60000 overflows
    activation.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(made[0].check(), gate * gate.sigmoid() * up, dtype)
    assert activation.silu_mul(gate_up[:0]).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 111), (2, 1500)])
def test_gelu_tanh_mul(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = caught(monkeypatch, activation)
    gate_up = numbers(rows, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[-1, width - 1], gate_up[-1, -1] = -6e4, 6e4, 0.5  # whose cube no float16 holds
    activation.gelu_tanh_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(made[0].check(), torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)
    assert activation.gelu_tanh_mul(gate_up[:0]).shape == (0, width)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 111), (2, 1500)])
def test_soft_cap(rows: int, width: int) -> None:
    logits = Guarded.of((rows, width), torch.float32)
    logits.tensor.copy_(torch.randn(rows, width) * 40)
    logits.tensor[0, 0], logits.tensor[-1, -1] = 3e38, -3e38
    want = definitions.soft_cap_(logits.tensor.double(), 30.0)
    assert activation.soft_cap_(logits.tensor, 30.0) is logits.tensor
    assert_close(logits.check(), want, torch.float32)
    logits.tensor[0, 0] = float("nan")
    assert activation.soft_cap_(logits.tensor, 30.0)[0, 0].isnan()


@pytest.mark.parametrize("width", [1, 100, 2050])
def test_embedding(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = numbers(11, width, dtype=torch.float16), torch.tensor([10, 0, 3, 3])
    made = caught(monkeypatch, embedding)
    embedding.embedding(ids, table)
    assert torch.equal(made[0].check(), table[ids])
    assert embedding.embedding(torch.tensor([11, -1, 2**40]), table).isnan().all()
    assert embedding.embedding(ids[:0], table).shape == (0, width)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_runs_change_what_they_cover(dtype: torch.dtype) -> None:
    lengths = [3, 0, 300, 1]
    rows, firsts = torch.tensor([2, 0, 3, 2]), torch.tensor([5, 0, 17, 8])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    table = Guarded.of((5, 400), dtype)
    wanted, values = table.tensor.clone(), torch.arange(1000, 1000 + sum(lengths), dtype=dtype)
    inputs.write_runs_(wanted, rows, firsts, offsets, values)
    input_kernels.write_runs_(table.tensor, rows, firsts, offsets, values)
    input_kernels.write_runs_(table.tensor, rows[:0], firsts[:0], offsets[:1], values[:0])
    assert torch.equal(table.tensor, wanted) and is_poison(table.whole[[*range(GUARD), *range(-GUARD, 0)]]).all()


@pytest.mark.parametrize("lens", [[1], [1] * 9, [1, 1, 7, 130, 2], [5, 300]])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_inputs_of_a_step(lens: list[int], block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(len(lens))
    slots = torch.tensor(rng.sample(range(12), len(lens)))
    starts, ends = torch.tensor([rng.randrange(50) for _ in lens]), torch.tensor(lens).cumsum(0)
    tokens, tables = torch.randint(0, 1 << 40, (12, 360)), torch.randint(0, 2**31, (12, 360), dtype=torch.int32)
    made = caught(monkeypatch, input_kernels)
    total = sum(lens)
    input_kernels.build_inputs(tokens, tables, slots, starts, ends, block_size, total + 3)
    found = inputs.StepInputs(*made[0].tensor)
    assert is_poison(made[0].whole[[*range(GUARD), *range(-GUARD, 0)]]).all()
    at = 0
    for slot, start, num in zip(slots.tolist(), starts.tolist(), lens, strict=True):
        positions = torch.arange(start, start + num)
        assert torch.equal(found.ids[at : at + num], tokens[slot, positions])
        assert torch.equal(found.positions[at : at + num], positions)
        block = tables[slot, positions // block_size].long()
        assert torch.equal(found.write_slots[at : at + num], block * block_size + positions % block_size)
        at += num
    assert [column[total:].tolist() for column in found] == [[0] * 3, [0] * 3, [-1] * 3]
    reference = inputs.build_inputs(tokens, tables, slots, starts, ends, block_size, total + 3)
    assert all(map(torch.equal, found, reference))


def test_what_is_on_a_gpu_comes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, ids = torch.randn(4, 64), torch.randn(64), torch.tensor([3, 0])
    projection = torch.randn(32, 64)

    def use() -> list[Tensor]:
        packed = (linear.GpuLinear if gpu.takes(x) else linear.PackedLinear)(projection, None)
        return [ops.rms_norm(x, weight, 1e-6), ops.embedding(ids, x), packed.apply_gated(x, weight, 1e-6)]

    wanted = use()
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    for found, want in zip(use(), wanted, strict=True):
        assert torch.allclose(found, want, atol=1e-5)
