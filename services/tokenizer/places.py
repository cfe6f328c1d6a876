"""Where tokens are in their text, in code points."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer


class PlacedTokens(NamedTuple):
    """The token ids of a text, and where each begins and ends in it; 0 and 0 for one that the tokenizer has added."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def placed(tokenizer: Tokenizer, text: str, cuts: Sequence[int], add_special_tokens: bool) -> PlacedTokens:
    """Returns the tokens of a text that is cut at `cuts` before it is encoded."""
    begins = (0, *cuts)
    texts = [text[start:end] for start, end in itertools.pairwise((*begins, len(text)))]
    pieces = tokenizer.encode_batch(texts, add_special_tokens=False)
    whole = Encoding.merge(pieces, growing_offsets=False)
    if add_special_tokens:
        whole = tokenizer.post_process(whole)
    shifted = _shifted(pieces, begins)
    places = [(0, 0) if is_added else next(shifted) for is_added in whole.special_tokens_mask]
    return PlacedTokens(whole.ids, [start for start, _ in places], [end for _, end in places])


def _shifted(pieces: Sequence[Encoding], begins: Sequence[int]) -> Iterator[tuple[int, int]]:
    for piece, begin in zip(pieces, begins, strict=True):
        for start, end in piece.offsets:
            yield start + begin, end + begin
