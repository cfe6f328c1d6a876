"""The sampling kernels against their torch reference: random words to the bit, tokens unless two scores nearly tie.

A row costs the interpreter a quarter of a second, so that rows of all kinds go together.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.reference import philox
from sluice_server.kernels.reference import sampling as reference
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.triton import sampling
from sluice_server.kernels.triton.noise import gumbel, uniform_words
from tests.kernels.cpu.test_native_sampling import TIE, score
from tests.kernels.reference.test_sampling import ALL, Params, mixed_rows, random_logits, rows_of
from tests.kernels.triton.harness import Guarded

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234567890ABCDEF]


def check_equal(logits: Tensor, rows: Rows) -> Tensor:
    """Checks the kernels' tokens; ids beyond a row of `logits` have larger values and must never be seen."""
    wide = torch.full((len(logits), logits.shape[1] + 5), 1e9)
    given = wide[:, : logits.shape[1]].copy_(logits)
    expected, bad = reference.sample(logits, rows)
    found, found_bad = sampling.sample(given, rows)
    assert torch.equal(found_bad, bad) and torch.equal(given.nan_to_num(7.0), logits.nan_to_num(7.0))
    for row in (found != expected).nonzero()[:, 0].tolist():
        scores = [score(logits, rows, row, int(ids[row])) for ids in (found, expected)]
        assert abs(scores[0] - scores[1]) < TIE, f"row {row}: {found[row]} instead of {expected[row]}"
    return found


def every_kind() -> Rows:
    """One row of each of the reference's test parameters, greedy too."""
    kinds: list[Params] = [*ALL, (0.0, 5, 0.5, 0.1, 0.5)]
    one = [rows_of(1, *params, seed=13 * at) for at, params in enumerate(kinds)]
    return Rows(*(torch.cat(columns) for columns in zip(*one, strict=True)))


@triton.jit  # type: ignore[untyped-decorator] # Triton has no types
def noise_kernel(seeds_ptr, positions_ptr, outputs_ptr, uniform_ptr, gumbel_ptr, CALLS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """Grid: R."""
    row = tl.program_id(0)
    calls = tl.arange(0, CALLS)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    uniform = uniform_words(seed, position, tl.load(outputs_ptr + row), calls)
    at = row * 4 * CALLS + calls[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(uniform_ptr + at, uniform)
    tl.store(gumbel_ptr + at, gumbel(uniform))


def test_noise_is_that_of_the_cpu_to_the_bit() -> None:
    seeds = torch.tensor(SEEDS)
    positions, outputs = (
        torch.tensor([0, 1, 2**32 - 1, 7, 131_071, 2**31]),
        torch.tensor([0, 3, 2**32 - 1, 1, 0, 2**31]),
    )
    uniform, noise = (Guarded.of((len(seeds), 256), torch.float32) for _ in range(2))
    noise_kernel[len(seeds),](seeds, positions, outputs, uniform.tensor, noise.tensor, 64)
    wanted = philox.row_uniforms(seeds, positions, outputs, 256)
    assert torch.equal(uniform.check(), wanted)
    exact = -torch.log(-torch.log1p(-wanted.double()))
    assert (noise.check().double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("vocab", [1, 111])
def test_tokens_are_those_of_the_reference(vocab: int) -> None:
    check_equal(random_logits(11, vocab, 3.0, seed=vocab), every_kind())


@pytest.mark.parametrize("tile", [256, 1024])  # flat rows are read themselves, or their gathered values bisected
def test_long_rows_are_narrowed_or_read_themselves(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TILE", tile)
    logits = random_logits(11, 1003, 3.0)
    logits[1] /= 30  # so even that more than a tile may be kept
    logits[3] /= 30
    logits[6, 300:] = -math.inf
    check_equal(logits, every_kind())


def test_a_row_alone_gets_the_token_it_gets_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TILE", 128)  # so that rows are split differently
    monkeypatch.setattr(sampling, "CALLS", 32)
    logits, rows = random_logits(4, 1000), mixed_rows(4)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "splits_of", lambda num, vocab: 1)
        together, _ = sampling.sample(logits, rows)
    for row in range(2):
        alone, _ = sampling.sample(logits[row : row + 1], rows.take(torch.tensor([row])))
        assert alone[0] == together[row]


def test_ties_are_kept_whole_and_the_lowest_id_is_greedy() -> None:
    logits = torch.full((6, 40), -50.0)
    logits[:, [4, 9, 31]] = 1.0
    rows = rows_of(6, 1.0, 2, 0.3, 0.0)
    rows.temperature[3:] = 0.0
    tokens = check_equal(logits, rows)
    assert tokens[3:].tolist() == [4, 4, 4]


def test_unusable_rows_are_named_and_the_others_unharmed() -> None:
    logits = random_logits(4, 50)
    for row, at, value in ((0, 49, math.nan), (2, 3, math.inf), (3, slice(None), -math.inf)):
        logits[row, at] = value
    rows = rows_of(4, 1.0, 5, 0.9, 0.1, 0.9)
    rows.temperature[2] = 0.0
    assert check_equal(logits, rows)[[0, 2, 3]].tolist() == [-1, -1, -1]


def test_rows_that_no_program_could_take_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 rows of up to 524288 ids"):
        sampling.sample(torch.zeros(2, 30, dtype=torch.float16), mixed_rows(2))
    with pytest.raises(ValueError, match="float32 rows"):
        sampling.sample(torch.zeros(2, 30).t(), mixed_rows(30))
    assert len(sampling.sample(torch.zeros(0, 30), mixed_rows(0))[0]) == 0


@pytest.mark.parametrize(("num", "vocab", "splits"), [(1, 1, 1), (1, 151_936, 64), (64, 151_936, 8), (300, 32_000, 1)])
def test_few_rows_are_split(num: int, vocab: int, splits: int) -> None:
    assert sampling.splits_of(num, vocab) == splits


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vocab", [7, 4096, 32_003, 151_936])
@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_tokens_are_those_of_the_reference_at_any_width(vocab: int, scale: float) -> None:
    check_equal(random_logits(11, vocab, scale), every_kind())
    check_equal(random_logits(24, vocab, scale), mixed_rows(24))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("params", ALL)
def test_draws_follow_the_kept_set(params: Params) -> None:
    logits = random_logits(1, 40, scale=2.0).expand(200, -1).contiguous()
    check_equal(logits, rows_of(200, *params))


def test_logits_on_a_gpu_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    called: list[tuple[int, ...]] = []
    monkeypatch.setattr(sampling, "sample", lambda logits, rows: called.append(tuple(logits.shape)))
    ops.sample(torch.zeros(3, 20), mixed_rows(3))
    assert called == [(3, 20)]
