"""Greedy tokens through the real ring equal `transformers`, many requests at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.test_engine_oracle import SHAPES, some_prompts
from tests.oracle.checkpoints import greedy, make_checkpoint, reference
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import generate, serve, spec

TIGHT = ("--block-size", "8", "--kv-cache-tokens", "112", "--max-num-batched-tokens", "7", "--max-num-seqs", "5")


# tests/engine compares what every architecture computes; the ring carries ids, whatever they come from.
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen3", "gemma2")]


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-tied", *OTHERS])
def test_ring_equals_transformers(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    make_checkpoint(tmp_path, shape)
    byte_level_bpe(tmp_path)
    prompts = list(some_prompts(shape.vocab, 8).values())
    oracle = reference(tmp_path)
    want = [greedy(oracle, prompt, 12) for prompt in prompts]
    with serve("--model", str(tmp_path), "--dtype", "float32", *TIGHT) as service, service.stub() as stub:
        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(lambda prompt: generate(stub, spec(prompt, 12)), prompts))
        assert [[token.id for token in output.tokens] for output in outputs] == want
