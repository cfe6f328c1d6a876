"""Each token is scored once, for any windows; two models are compared at the same positions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sluice_server.demo import score
from sluice_server.demo.model import Llama, ModelShape

SHAPE = ModelShape(50, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=600)


def model(seed: int) -> Llama:
    one = Llama(SHAPE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # a fresh model's layers write nothing, and it would predict what it reads
        for weight in one.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return one.eval()


def document(length: int) -> score.Ids:
    return np.random.default_rng(length).integers(0, 50, size=length)


@pytest.mark.parametrize("length", [1, 2, 600, 601, 602, 1000])
def test_windows_predict_each_token_once(length: int) -> None:
    whole = np.arange(length)
    predicted = [window[first + 1 :] for window, first in score.windows([whole], 600)]
    assert np.array_equal(np.concatenate([whole[:1], *predicted]), whole)
    assert all(window.shape[0] <= 601 for window, _ in score.windows([whole], 600))


def test_the_score_of_a_short_document_is_its_cross_entropy() -> None:
    ids, one = document(40), model(1)
    got = score.score(one, model(2), [ids, ids])
    logits = one(torch.from_numpy(ids[None, :-1]))[0]
    expected = 2 * F.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="sum").item()
    assert got.target_nats == pytest.approx(expected, rel=1e-5) and got.num_tokens == 78
    assert got.draft_nats != pytest.approx(expected, rel=1e-3)


def test_a_model_agrees_with_itself_and_seldom_with_another() -> None:
    documents = [document(700)]
    assert score.score(model(1), model(1), documents).num_agreed == 699
    assert score.score(model(1), model(2), documents).num_agreed < 350


def test_bits_per_byte() -> None:
    assert score.bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)
    uniform = [np.tile(np.array([0, 1]), 500)]
    assert score.ngram_bits_per_byte(uniform, uniform, 2, 1000) < 0.05
