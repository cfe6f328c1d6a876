"""The reference sampler: its distribution, its truncation rule, and independence of a row's token from other rows."""

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sluice_server.kernels.reference import sampling as under_test
from sluice_server.kernels.reference.sampling import Rows, from_candidates, from_whole_row, greedy, sample

DRAWS = 20_000
# temperature, top_k, top_p, min_p, typical_p
Params = tuple[float, int, float, float, float]
NARROW: list[Params] = [
    (1.0, 0, 1.0, 0.0, 1.0),
    (0.7, 0, 1.0, 0.0, 1.0),
    (1.0, 5, 1.0, 0.0, 1.0),
    (1.0, 0, 0.8, 0.0, 1.0),
    (1.0, 0, 1.0, 0.1, 1.0),
    (1.0, 0, 1.0, 0.0, 0.6),
]
ALL: list[Params] = [
    *NARROW,
    (0.8, 20, 0.9, 0.02, 1.0),
    (1.5, 50, 0.95, 0.05, 1.0),
    (2.0, 7, 0.5, 0.0, 1.0),
    (1.2, 40, 0.9, 0.01, 0.7),
]


def rows_of(  # noqa: PLR0913 # a row's parameters one by one
    count: int, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0, seed: int = 11
) -> Rows:
    return Rows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        typical_p=torch.full((count,), typical_p),
        seeds=torch.full((count,), seed),
        positions=torch.arange(count),
        outputs=torch.zeros(count, dtype=torch.int64),
    )


def random_logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_rows(count: int) -> Rows:
    generator = torch.Generator().manual_seed(5)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return Rows(
        temperature=pick([0.0, 0.3, 0.8, 1.0, 2.0]),
        top_k=pick([0, 0, 1, 5, 50, 500, 5000]).long(),
        top_p=pick([1.0, 0.95, 0.5, 0.999]),
        min_p=pick([0.0, 0.0, 0.05, 1.0]),
        typical_p=pick([1.0, 1.0, 0.9, 0.3]),
        seeds=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        positions=torch.randint(0, 100_000, (count,), generator=generator),
        outputs=torch.randint(0, 8, (count,), generator=generator),
    )


def hugging_face(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> Tensor:
    """Hugging Face's probabilities [V] of one row [V]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        warpers.append(TypicalLogitsWarper(typical_p))
    scores: Tensor = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())  # type: ignore[arg-type] # its LongTensor alias
    return scores[0].double().softmax(0)


@pytest.mark.parametrize("params", ALL)
def test_draws_follow_hugging_face(params: Params) -> None:
    logits = random_logits(1, 111, scale=2.0)
    expected = hugging_face(logits[0], *params) * DRAWS
    ids, bad = sample(logits.expand(DRAWS, -1), rows_of(DRAWS, *params))
    counts = torch.bincount(ids, minlength=111).double()
    kept = expected > 0
    assert not bad.any() and not counts[~kept].any()
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None])).clamp_(min=1e-9)
    freedom = max(int((wanted > 1e-6).sum()) - 1, 1)
    chi_squared = ((observed - wanted) ** 2 / wanted).sum().item()
    assert chi_squared < freedom + 4 * math.sqrt(2 * freedom) + 4  # beyond the 99.9th percentile; the seed is fixed


@pytest.mark.parametrize("vocab", [111, 32_000, 151_936])
@pytest.mark.parametrize("params", ALL)
def test_candidates_and_whole_row_agree(vocab: int, params: Params) -> None:
    count = 200 if vocab < 1000 else 4
    logits = random_logits(count, vocab, scale=5.0)
    rows = rows_of(count, *params)
    scaled = (logits - logits.amax(1, keepdim=True)) / rows.temperature[:, None]
    whole = from_whole_row(scaled, rows)
    for width in (8, 64, 100) if params[4] == 1 else ():  # typical-p looks at the whole row always
        ids, sure = from_candidates(scaled, rows, width)
        assert torch.equal(ids[sure], whole[sure])
    assert torch.equal(sample(logits, rows)[0], whole)


def test_candidates_suffice_in_the_common_case() -> None:
    logits = random_logits(64, 8192)
    rows = rows_of(64, 1.0, 50, 0.9, 0.0)
    _, sure = from_candidates(logits - logits.amax(1, keepdim=True), rows, 64)
    assert sure.all()


@pytest.mark.parametrize(("top_k", "top_p"), [(64, 1.0), (0, 0.99), (0, 1.0), (1000, 0.5)])
def test_candidates_know_when_they_are_too_few(top_k: int, top_p: float) -> None:
    logits = random_logits(16, 8192, scale=0.5)
    _, sure = from_candidates(logits - logits.amax(1, keepdim=True), rows_of(16, 1.0, top_k, top_p, 0.0), 64)
    assert not sure.any()


@pytest.mark.parametrize("vocab", [111, 8192, 32_000])
def test_a_row_alone_gets_the_token_it_gets_in_company(vocab: int) -> None:
    logits, rows = random_logits(33, vocab, scale=4.0), mixed_rows(33)
    together, _ = sample(logits, rows)
    for at in range(33):
        alone, _ = sample(logits[at : at + 1].clone(), Rows(*(column[at : at + 1] for column in rows)))
        assert alone.item() == together[at].item()


def test_top_p_after_top_k_is_of_the_kept_mass_in_any_company() -> None:
    logits = random_logits(2000, 3000, scale=0.5, seed=3)[:1].expand(2000, -1)
    rows = rows_of(2000, 1.0, 10, 0.5, 0.0)
    alone, _ = sample(logits, rows)
    rows.top_k[::2] = 0  # neighbours whose nucleus is of the whole row's mass
    together, _ = sample(logits, rows)
    kept = set(hugging_face(logits[0], 1.0, 10, 0.5, 0.0).nonzero()[:, 0].tolist())
    assert 1 < len(kept) < 10 and set(together[1::2].tolist()) == kept
    assert torch.equal(together[1::2], alone[1::2])


def test_order_of_rows_changes_nothing() -> None:
    logits, rows = random_logits(33, 5000, scale=4.0), mixed_rows(33)
    turned = sample(logits.flip(0), Rows(*(column.flip(0) for column in rows)))[0]
    assert torch.equal(turned.flip(0), sample(logits, rows)[0])


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, 50)
    logits[0, [41, 7, 33]] = 2.0
    assert greedy(logits)[0].tolist() == [7, 0]
    assert sample(logits, rows_of(2, 0.0, 0, 1.0, 0.0))[0].tolist() == [7, 0]


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.3), (2, 0.3)])
@pytest.mark.parametrize("vocab", [20, 3000])
def test_a_tie_at_the_boundary_is_kept_whole(vocab: int, top_k: int, top_p: float) -> None:
    logits = torch.full((2000, vocab), -20.0)
    logits[:, 3] = 1.0
    logits[:, [5, 9, 15]] = 0.9
    ids, _ = sample(logits, rows_of(2000, 1.0, top_k, top_p, 0.0))
    assert set(ids.tolist()) == {3, 5, 9, 15}


def test_a_row_of_equals_keeps_everything() -> None:
    ids, _ = sample(torch.zeros(3000, 100), rows_of(3000, 1.0, 5, 0.5, 0.5))
    assert len(set(ids.tolist())) == 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows_are_named_and_the_others_unharmed(temperature: float) -> None:
    logits = random_logits(6, 300)
    clean = sample(logits, rows_of(6, temperature, 40, 0.9, 0.0))[0]
    logits[0, 299] = math.nan
    logits[2] = -math.inf
    logits[4, 3] = math.inf
    ids, bad = sample(logits, rows_of(6, temperature, 40, 0.9, 0.0))
    assert bad.tolist() == [True, False, True, False, True, False]
    assert ids.tolist() == [-1, clean[1].item(), -1, clean[3].item(), -1, clean[5].item()]
    assert (~torch.isfinite(greedy(logits)[1])).tolist() == bad.tolist()


@pytest.mark.parametrize("params", ALL)
def test_minus_infinity_is_never_drawn(params: Params) -> None:
    logits = torch.full((2000, 300), -math.inf)
    logits[:, [4, 17]] = torch.tensor([0.0, 0.5])
    ids, bad = sample(logits, rows_of(2000, *params))
    assert not bad.any() and set(ids.tolist()) <= {4, 17}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = random_logits(500, 1000, scale=30.0)
    ids, bad = sample(logits, rows_of(500, temperature, 0, 1.0, 0.0))
    agreeing = (ids == logits.argmax(1)).float().mean().item()
    assert not bad.any() and (agreeing == 1.0 if temperature < 1 else agreeing < 0.2)


def test_outputs_positions_and_high_seeds_differ() -> None:
    logits = torch.zeros(1, 1000).expand(4, -1)
    rows = rows_of(4, 1.0, 0, 1.0, 0.0)._replace(
        seeds=torch.tensor([3, 3, 3, 3 - 2**63]),
        positions=torch.tensor([1, 2, 1, 1]),
        outputs=torch.tensor([0, 0, 1, 0]),
    )
    assert len(set(sample(logits, rows)[0].tolist())) == 4


def test_how_far_candidates_reach_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = random_logits(33, 5000, scale=4.0), mixed_rows(33)
    usual, _ = sample(logits, rows)
    monkeypatch.setattr(under_test, "FEW", 4)
    monkeypatch.setattr(under_test, "MANY", 20)
    monkeypatch.setattr(under_test, "_COLD", 99.0)
    assert torch.equal(sample(logits, rows)[0], usual)
