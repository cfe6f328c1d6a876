"""Low-rank products by the C++ kernels against those of torch, in every format of a file and every build."""

import itertools

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.formats.side_products import Side, SidePart, bytes_of, in_blocks, together

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUILDS = [
    pytest.param(name, marks=pytest.mark.skipif(builds.load(name) is None, reason="not built"))
    for name in builds.runnable()
]


def random_side(inputs: int, parts: list[tuple[int, int]], a: torch.dtype, b: torch.dtype, seed: int = 0) -> Side:
    """Of parts (rank, rows); the second part's rows lie behind a gap that nothing is added to."""
    generator = torch.Generator().manual_seed(seed)
    found, first = [], 0
    for rank, rows in parts:
        half = torch.randn(rank, inputs, generator=generator).to(a), torch.randn(rows, rank, generator=generator).to(b)
        found.append(SidePart(half[0], in_blocks(half[1]), 0.25 + rank, first, rows))
        first += rows + 5
    return Side(tuple(found), torch.rand(inputs, generator=generator) + 0.5)


def dense(side: Side, x: Tensor, outputs: int, b: list[Tensor]) -> Tensor:
    """The products in float64."""
    y = torch.zeros(len(x), outputs, dtype=torch.float64)
    for one, own in zip(side.parts, b, strict=True):
        assert side.norm is not None
        low = x.double() * side.norm.double() @ one.a.double().t()
        y[:, one.first : one.first + one.rows] += low @ own.double().t() * one.scale
    return y


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("a", "b"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
def test_products_equal_those_of_torch_and_of_float64(
    build: str, a: torch.dtype, b: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths and heights that no vector, tile or block divides; ranks 1 to 256; one row and more than a tile."""
    for inputs, parts in ((48, [(1, 64), (3, 40), (17, 130)]), (67, [(256, 33)]), (16, [(16, 64), (8, 200)])):
        side = random_side(inputs, parts, a, b)
        outputs = side.parts[-1].first + side.parts[-1].rows + 3
        x, start = torch.randn(37, inputs), torch.randn(37, outputs)
        monkeypatch.setattr(builds, "MODULE", builds.load(build))
        found = side.add_to(start.clone(), x)
        monkeypatch.setattr(builds, "MODULE", None)
        wanted = side.add_to(start.clone(), x)
        generator = torch.Generator().manual_seed(0)
        halves = []
        for rank, rows in parts:
            torch.randn(rank, inputs, generator=generator)
            halves.append(torch.randn(rows, rank, generator=generator).to(b))
        exact = start + dense(side, x, outputs, halves)
        size = float(exact.abs().max())
        assert float((found - exact).abs().max()) < 1e-5 * size
        assert float((wanted - exact).abs().max()) < 1e-5 * size
        untouched = torch.ones(outputs, dtype=torch.bool)
        for one in side.parts:
            untouched[one.first : one.first + one.rows] = False
        assert torch.equal(found[:, untouched], start[:, untouched])


@pytest.mark.parametrize("build", BUILDS)
def test_beside_a_weight_of_bfloat16_numbers_are_rounded_as_its_own(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x is a little over 1, which bfloat16 has not; nor has it 257, the number of inputs."""
    monkeypatch.setattr(builds, "MODULE", builds.load(build))
    x, ones = torch.full((5, 257), 1 + 2**-10), torch.ones(3, 257)
    rounds = "avx512_bf16" in builds.BY_EXTENSION.get(build, ())
    for dtype, form in itertools.product(DTYPES, (native.FLOAT32, native.BFLOAT16, native.INT8)):
        b = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 4.0]])
        side = Side((SidePart(ones.to(dtype), in_blocks(b.to(dtype)), 1.0, 1, 2),))
        found = side.add_to(torch.ones(5, 3), x, form)
        is_rounded = rounds and dtype is torch.bfloat16 and form == native.BFLOAT16
        low = 256.0 if is_rounded else 257 * (1 + 2**-10)
        assert torch.equal(found, torch.tensor([1, 1 + low, 1 + 4 * low]).expand(5, 3)), (dtype, form)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("a", "b"), [(DTYPES[1], DTYPES[1]), (DTYPES[1], DTYPES[0]), (DTYPES[2], DTYPES[1])])
def test_rounded_products_are_near_those_of_float64(
    build: str, a: torch.dtype, b: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "MODULE", builds.load(build))
    for inputs, parts in ((48, [(1, 64), (3, 40), (17, 130)]), (67, [(65, 33)]), (16, [(16, 64), (8, 200)])):
        side = random_side(inputs, parts, a, b)
        outputs = side.parts[-1].first + side.parts[-1].rows
        x = torch.randn(37, inputs)
        found, wanted = (side.add_to(torch.zeros(37, outputs), x, form) for form in (native.BFLOAT16, native.FLOAT32))
        assert float((found - wanted).abs().max()) < 0.01 * float(wanted.abs().max())


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("form", [native.FLOAT32, native.BFLOAT16])
def test_a_row_does_not_depend_on_the_others(ours: bool, form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    side = random_side(80, [(5, 72), (20, 64)], torch.bfloat16, torch.bfloat16)
    x, y = torch.randn(70, 80), torch.randn(70, 160)
    together_ = side.add_to(y.clone(), x, form)
    for first, last in itertools.pairwise((0, 1, 3, 8, 41, 70)):
        assert torch.equal(side.add_to(y[first:last].clone(), x[first:last], form), together_[first:last])


def test_matrices_take_the_bytes_of_their_file_in_one_memory() -> None:
    sides = [random_side(64, [(4, 96)], torch.bfloat16, torch.float16), None, random_side(32, [(8, 64)], *DTYPES[:2])]
    tensors = sum(half.nbytes for side in sides if side for one in side.parts for half in (one.a, one.b))
    moved = together(sides)
    assert bytes_of(moved) == tensors  # each of which ends with a cache line
    places = [half.data_ptr() for side in moved if side for one in side.parts for half in (one.a, one.b)]
    assert places == sorted(places) and places[-1] - places[0] < tensors
    for before, after in zip(sides, moved, strict=True):
        assert (before is None) == (after is None)
        for old, new in zip(before.parts if before else (), after.parts if after else (), strict=True):
            assert torch.equal(old.a, new.a) and torch.equal(old.b, new.b) and old.scale == new.scale
