"""The benchmark of long contexts: its cases, its ratios, and that contexts of our engine are there without being
computed."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from benchmarks.cpu.long_context import Found, cases, table
from benchmarks.cpu.memory_worker import bytes_of
from benchmarks.cpu.own_context_worker import OwnContexts
from benchmarks.cpu.shapes import Shape as SmallShape
from tests.oracle.checkpoints import Shape, make_checkpoint


def test_contexts_become_shorter_and_end_with_one_that_is_hardly_any() -> None:
    options = argparse.Namespace(contexts="1024,8192", rows="1,8", parts="decode,shared,prefill", prefix=4096)
    decodes = [("decode", context, rows) for context in (8192, 1024, 64) for rows in (1, 8)]
    assert list(cases(options)) == [*decodes, ("shared", 4096, 8), ("prefill", 4096, 1)]
    options.parts = "prefill"
    assert list(cases(options)) == [("prefill", 4096, 1)]


def found() -> Found:
    steps = {"bfloat16": 30.0, "int8": 20.0, "llama.cpp f16": 60.0, "llama.cpp q8_0": 80.0, "float32": 50.0}
    return {
        ("decode", context, 8, run, name): (ms if context > 64 else 10.0) + run
        for name, ms in steps.items()
        for context in (64, 1024)
        for run in range(3)
    }


def test_ours_is_compared_with_peers_whose_cache_is_as_small() -> None:
    figures = table(found() | {("decode", 1024, 8, 0, "memory int8"): 18.0})
    assert figures["memory_over_best_peer"] == {"decode, 1024 tokens, 8 rows": {"int8": 0.22}}
    assert figures["over_best_peer"] == {
        "decode, 1024 tokens, 8 rows": {"float32": 0.84, "bfloat16": 0.51, "int8": 0.26}
    }
    assert figures["int8_attention_over_bfloat16"] == {"1024 tokens, 8 rows": 0.5}
    ms = figures["ms"]
    assert isinstance(ms, dict)
    row = ms["decode, 64 tokens, 8 rows"]["int8"]
    assert row == {"ms": 11.0, "least": 10.0, "most": 12.0, "runs": 3}


def test_what_a_step_has_to_read() -> None:
    """A layer of one head of 16 numbers: 4 * 16 * 8 weights of attention, 3 * 8 * 8 of the MLP, three norms, a head."""
    shape = SmallShape("LlamaForCausalLM", "llama", 8, 8, 1, 1, 1, 16, 10, tie_word_embeddings=False)
    weights = 4 * (4 * 16 * 8 + 3 * 8 * 8 + 3 * 8 + 10 * 8)
    assert bytes_of(shape, "float32", 0) == weights
    assert bytes_of(dataclasses.replace(shape, tie_word_embeddings=True), "float32", 0) == weights
    assert bytes_of(shape, "bfloat16", 5) == weights + 5 * 2 * 16 * 2
    assert bytes_of(shape, "int8", 5) == weights + 5 * 2 * (16 + 4)


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_steps_behind_imported_contexts(tmp_path: Path, cache_dtype: str) -> None:
    """The worker itself asserts that no token of a context is computed."""
    make_checkpoint(tmp_path, Shape("llama", context=4096))
    contexts = OwnContexts(tmp_path, cache_dtype, 512)
    for context, rows, shared in ((512, 8, False), (64, 1, False), (256, 8, True)):
        took = contexts.decode(context, rows, 3, shared=shared)
        assert len(took) == 3 and min(took) > 0
    assert contexts.built.engine.scheduler.num_running == 0
    assert len(contexts.prefill(200)) == 1
    contexts.built.close()
