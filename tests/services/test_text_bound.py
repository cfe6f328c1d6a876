"""The lower bound of a text's tokens by its bytes: never above the real number, and unknown for other tokenizers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.text_bound import check_bytes, longest_token
from tests.oracle.tokenizers import FAMILIES, byte_level_bpe

ALPHABET = "aab  \n\t.,1é日😀<s>hello world the quick brown fox"


def texts(rng: random.Random, num: int) -> list[str]:
    words = ["hello", " world", "\n\n", " " * 9, "日本", "é", "<s>", "</s>", "\x00", "😀", "0123"]
    return ["".join(rng.choices([*ALPHABET, *words], k=rng.randrange(1, 200))) for _ in range(num)]


@pytest.mark.parametrize("family", [*FAMILIES, "demo"])
def test_a_text_has_no_fewer_tokens(family: str, tmp_path: Path) -> None:
    if family != "demo":
        FAMILIES[family](tmp_path)
    path = (resolve_model("demo", "").directory if family == "demo" else tmp_path) / "tokenizer.json"
    longest, tokenizer = longest_token(path), Tokenizer.from_file(str(path))
    assert bool(longest) == (family != "unigram")
    for text in texts(random.Random(family), 300):
        num = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert not longest or num * longest >= len(text.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}},
        {"pre_tokenizer": None},
        {"model": {"type": "Unigram", "vocab": []}},
        {"added_tokens": [{"content": "<m>", "lstrip": True, "rstrip": False}]},
    ],
)
def test_what_may_drop_bytes_is_unknown(change: dict[str, Any], tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    path = tmp_path / "tokenizer.json"
    assert longest_token(path) > 0
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert longest_token(path) == 0
    path.write_text("{")
    assert longest_token(path) == 0 == longest_token(tmp_path / "nowhere.json")


def test_what_cannot_fit_is_refused_with_its_size_and_the_limit() -> None:
    limits, params = Limits(context_length=100, vocab_size=400), SamplingParams(max_tokens=4)
    check_bytes(960, 10, params, limits)
    check_bytes(10**9, 0, params, limits)
    with pytest.raises(
        ServiceError, match="prompt has 961 bytes, which are 97 tokens or more; this model allows 100"
    ) as e:
        check_bytes(961, 10, params, limits)
    assert (e.value.reason, e.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
    assert e.value.details == {"limit": "100", "actual": "101"}
