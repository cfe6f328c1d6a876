"""The same GGUF files in llama.cpp, where it is installed: ids of texts, greedy ids and logits.

llama.cpp lives in an environment of its own, see benchmarks/cpu/README.md. It looks up GELU in a table of float16,
rounds activations to the type of the weights, or to 8 bits, and knows no combining marks in some splits.
"""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.cpu.gguf_peer import NUM_GREEDY, PYTHON, ask, compare
from sluice_server.services.checkpoint.gguf.folder import open_folder
from sluice_server.services.checkpoint.gguf.pre_tokenizers import KINDS
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.gguf_files import of_tokenizer, write_gguf
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.checkpoint.gguf.test_gguf_models import SHAPES, TYPES, WIDE
from tests.services.checkpoint.gguf.test_gguf_tokenizer import texts

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"llama.cpp is not installed in {PYTHON.parents[1]}"),
]


def windows(vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(48)] for _ in range(2)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES[name])
    path = write_gguf(tmp_path, tmp_path / "x.gguf")
    found = compare(path, torch.float32, windows(SHAPES[name].vocab))
    assert found.error < (1e-2 if "gemma" in name else 1e-4)
    assert found.greedy == NUM_GREEDY and found.agreement == 1.0


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_is_read_as_llama_cpp_reads_it(kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, WIDE)
    found = compare(write_gguf(tmp_path, tmp_path / "x.gguf", kind), torch.float32, windows(112))
    assert found.divergence < {"F16": 1e-4, "BF16": 2e-3}.get(kind, 2e-2), "it rounds activations, too"
    assert found.greedy == NUM_GREEDY or kind not in ("F16", "BF16")


@pytest.mark.parametrize("pre", list(KINDS))
def test_texts_have_the_ids_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    make_checkpoint(tmp_path, dataclasses.replace(SHAPES["llama"], vocab=500, layers=1))
    vocabulary = of_tokenizer(tmp_path / "tokenizer.json", 500, pre, bos_token_id=0, eos_token_id=1)
    path = write_gguf(tmp_path, tmp_path / "x.gguf", vocabulary=vocabulary)
    known = [text for text in texts(1000) if text and "\u0301" not in text and "\u00a0" not in text]
    if pre in ("tekken", "gpt-4o"):  # it takes ASCII's capitals alone for such
        known = [text for text in known if text.isascii()]
    found, _ = ask(path, {"texts": known, "windows": [[1, 2]], "prompt": [1], "num": 0})
    tokenizer = Tokenizer.from_file(str(open_folder(path) / "tokenizer.json"))
    for text, ids in zip(known, found["texts"], strict=True):
        assert tokenizer.encode(text).ids == ids, repr(text)
    assert json.loads((open_folder(path) / "config.json").read_text())["vocab_size"] == 500
