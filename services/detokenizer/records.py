"""Builds the token records that clients see: id, bytes, and log probabilities if requested. Pure.

A record without log probabilities is the same everywhere, so it is built once for each id.
"""

from collections.abc import Sequence

from sluice_server.services.messages.details import PromptScores, TokenLogprobs, TokenRecord
from sluice_server.services.messages.messages import Tokens
from sluice_server.services.messages.work import unpack_ids
from sluice_server.services.tokenizer.pieces import Pieces


class Records:
    """Builds the records of messages."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._alone = _Alone(pieces)

    def of(self, came: Sequence[Tokens], num: int) -> tuple[TokenRecord, ...]:
        """Returns the records of the first `num` tokens of messages of one output."""
        if num == len(came) == 1 and not came[0].logprobs:
            return self._alone[came[0].ids[0]]
        records = [record for one in came for record in self._each(one)]
        return tuple(records[:num])

    def _each(self, message: Tokens) -> list[TokenRecord]:
        """Returns the records of a message's tokens."""
        if not message.logprobs:
            return [self._alone[token][0] for token in message.ids]
        return [self._scored(token, scores) for token, scores in zip(message.ids, message.logprobs, strict=False)]

    def of_prompt(self, prompt: PromptScores) -> tuple[TokenRecord, ...]:
        """Returns the records of a prompt's tokens; the first token has no log probability."""
        first, *rest = unpack_ids(prompt.ids)
        scored = [self._scored(token, scores) for token, scores in zip(rest, prompt.scores, strict=True)]
        return (*self._alone[first], *scored)

    def _scored(self, token: int, scores: TokenLogprobs) -> TokenRecord:
        rivals = (*scores.top_ids, *scores.asked_ids)
        return TokenRecord(token, self._pieces.get(token) or b"", scores, self._pieces(rivals))


class _Alone(dict[int, tuple[TokenRecord]]):
    """A dict from id to its record, in a tuple as messages hold it. At most as large as the vocabulary."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token: int) -> tuple[TokenRecord]:
        made = self[token] = (TokenRecord(token, self._pieces.get(token) or b""),)
        return made
