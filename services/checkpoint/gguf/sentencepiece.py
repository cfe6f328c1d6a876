"""Makes a tokenizer of the `tokenizers` library's BPE from a SentencePiece vocabulary with scores.

SentencePiece merges the neighbours that make the token of the highest score. In BPE terms, every way of splitting a
token into two tokens is a merge, and merges are ordered by their result's score.
"""

from collections.abc import Sequence

from sluice_server.engine.models.fields import Json

NORMAL = 1  # the type of a token that is merged from others
LONGEST = 128  # characters of such a token: the ways of splitting all tokens grow with it
MARK = "▁"  # stands for a space


def merges_of(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[Json]:
    """Returns the merges, first the ones that are made first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in vocab.items():
        if types[number] != NORMAL:
            continue
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in vocab and second in vocab:
                found.append((-scores[number], vocab[first], vocab[second], first, second))
    found.sort()
    return [[first, second] for _, _, _, first, second in found]


def sentencepiece_steps(prefix: bool) -> dict[str, Json]:
    """Returns normalizer, pre-tokenizer and decoder. `prefix`: whether a space is put before every text."""
    mark: Json = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    space: Json = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    before: list[Json] = [{"type": "Prepend", "prepend": MARK}] if prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, mark]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }
