"""Requests of Tokenize, and the place of each token in its text. Pure."""

from typing import NamedTuple

from sluice.v1 import inference_pb2, types_pb2


class TokenSpan(NamedTuple):
    """A token's place: the code points of the text from `start` up to `end`.

    Tokens that are parts of one code point have its place; one that the tokenizer has added has 0 and 0.
    """

    token_id: int
    start: int
    end: int


def tokenize_request(
    prompt: str | types_pb2.Chat, *, count_only: bool = False, offsets: bool = False
) -> inference_pb2.TokenizeRequest:
    """Returns the request for the tokens of a prompt."""
    request = inference_pb2.TokenizeRequest(count_only=count_only, offsets=offsets)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(prompt)
    return request


def spans(found: inference_pb2.TokenizeResponse) -> list[TokenSpan]:
    """Returns the places of the tokens of a response that has them."""
    return [TokenSpan(token.id, *place) for token, *place in zip(found.tokens, found.starts, found.ends, strict=True)]
