"""The cost of rounded weights and caches on the demo model and unseen text stays within bounds.

The model is tiny and its norms are alike, so these are no figures of real models: `make test-real` has those.
"""

import functools

import pytest

from benchmarks.cpu.divergence import Array, Quality, compare, log_softmax
from benchmarks.cpu.quality import FORMATS, TINY, WINDOW, logits_of
from sluice_server.demo import bpe, corpus

BOUNDS = {  # perplexity over that of float32, divergence
    "bfloat16": (1.001, 5e-5),
    "int8": (1.005, 5e-4),
    "int8, int8 cache": (1.006, 7e-4),
    "int4": (1.03, 2e-2),
}
NUM = 4


@functools.cache
def windows() -> list[list[int]]:
    split = corpus.collect(corpus.stdlib_root())
    documents = bpe.encode_documents(bpe.load_tokenizer(TINY / "tokenizer.json"), split.held_out)
    found = [ids[at : at + WINDOW].tolist() for ids in documents for at in range(0, len(ids) - WINDOW, WINDOW)]
    return found[:: len(found) // NUM][:NUM]


@functools.cache
def reference() -> list[Array]:
    return [log_softmax(logits) for logits in logits_of(TINY, FORMATS["float32"], windows())]


def quality_of(name: str) -> Quality:
    return compare(windows(), logits_of(TINY, FORMATS[name], windows()), reference())


def test_a_model_is_as_good_as_itself() -> None:
    same = quality_of("float32")
    assert same.divergence < 1e-9 and same.same == 1.0 and same.more == 0.0


@pytest.mark.parametrize("name", list(BOUNDS))
def test_a_number_format_costs_no_more_than_is_said(name: str) -> None:
    quality = quality_of(name)
    more, divergence = BOUNDS[name]
    assert quality.more < more - 1.0
    assert 0.0 < quality.divergence < divergence
