"""Products of which only some columns are wanted: these have the bits of the whole product; others are left out."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.integer_linear import integer_linear
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear
from sluice_server.kernels.formats.quantised import round_weight
from sluice_server.kernels.reference.adjust import TokenMask
from tests.kernels.cpu.native import kernels_of

INPUTS, FEATURES = 300, 1_030  # the last panel is not full
FORMATS = ["float32", "bfloat16", "int8", "int4"]
UNTOUCHED = 7.25


@pytest.fixture(params=[*builds.KNOWN, "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test with our kernels of each instruction set of this machine, and without."""
    name: str = request.param
    monkeypatch.setattr(builds, "MODULE", None if name == "torch" else kernels_of(name))
    return name


def packed(form: str) -> PackedLinear:
    weight = torch.randn(FEATURES, INPUTS)
    if form in ("int8", "int4"):
        return integer_linear(round_weight(weight, int(form[3:])), None, False)
    return weight_formats.pack(weight.to(getattr(torch, form)), gated=False, weights=form)


def masked(rows: list[int], ids: list[list[int]]) -> tuple[TokenMask, Tensor]:
    """The mask that has these ids for these rows, and the same as flags [rows, FEATURES]."""
    words = torch.zeros(len(rows), -(-FEATURES // 32), dtype=torch.int64)
    flags = torch.zeros(len(rows), FEATURES, dtype=torch.bool)
    for at, own in enumerate(ids):
        flags[at, own] = True
        for one in own:
            words[at, one // 32] |= 1 << one % 32
    return TokenMask(torch.tensor(rows), words.to(torch.int32)), flags


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num", [1, 9, 120])
def test_what_is_wanted_is_that_of_the_whole_product(form: str, num: int) -> None:
    torch.manual_seed(3)
    x, norm, linear = torch.randn(num, INPUTS), torch.rand(INPUTS), packed(form)
    rows = [row for row in range(num) if row % 4 != 1]  # the others want everything
    ids = [[[FEATURES - 1], [0, 63, 64], list(range(FEATURES)), [700 + row % 9], []][row % 5] for row in rows]
    wanted, flags = masked(rows, ids)
    whole, found = (ops.linear_normed_wide(x, norm, 1e-5, linear, wanted=one) for one in (None, wanted))
    assert torch.equal(found[rows][flags], whole[rows][flags])
    others = [row for row in range(num) if row not in rows]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_wanted_is_not_computed(kernels: str, form: str) -> None:
    linear = packed(form)
    if not isinstance(linear, NativeLinear):
        pytest.skip("a library computes whole rows")
    wanted, _ = masked([1, 2], [[200], []])
    y = torch.full((4, FEATURES), UNTOUCHED)
    linear.multiply(torch.randn(4, INPUTS), y, None, native.NO_NORM, native.STORE, wanted)
    assert (y[2] == UNTOUCHED).all() and y[1, 200] != UNTOUCHED
    assert (y[1, :128] == UNTOUCHED).all() and (y[1, 320:] == UNTOUCHED).all()
    assert not (y[[0, 3]] == UNTOUCHED).any()


def test_columns_that_do_not_fit_are_refused(kernels: str) -> None:
    linear, y = packed("int8"), torch.empty(3, FEATURES)
    if not isinstance(linear, NativeLinear):
        pytest.skip("a library computes whole rows")
    beyond, _ = masked([3], [[0]])
    short = TokenMask(torch.tensor([0]), torch.zeros(1, 3, dtype=torch.int32))
    for wrong in (beyond, short):
        with pytest.raises(ValueError, match="do not fit a result"):
            linear.multiply(torch.randn(3, INPUTS), y, None, native.NO_NORM, native.STORE, wrong)
