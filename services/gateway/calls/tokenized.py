"""Converts the answer of Tokenize to the contract's response, in slices that are encoded already. Pure."""

from collections.abc import Iterator, Mapping

from sluice.v1 import inference_pb2

from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.work import ints

SLICE_TOKENS = 1000


def tokenized(envelope: Envelope, value: Tokenized) -> Iterator[bytes]:
    """Yields the encoded response of Tokenize in slices, each made in a millisecond at most. Other calls can run
    between them: a text of 1 MiB may be a million tokens."""
    response, ids = inference_pb2.TokenizeResponse, ints(value.ids)
    num = len(ids) or value.num_tokens
    head = response(model=envelope.model, revision=envelope.revision, num_tokens=num, text=value.text)
    yield head.SerializeToString()
    entries = _Entries(value.pieces)
    for at in range(0, len(ids), SLICE_TOKENS):
        yield b"".join([entries[token_id] for token_id in ids[at : at + SLICE_TOKENS]])
    starts, ends = ints(value.starts), ints(value.ends)
    for at in range(0, len(starts), SLICE_TOKENS):
        part = slice(at, at + SLICE_TOKENS)
        yield response(starts=starts[part], ends=ends[part]).SerializeToString()


class _Entries(dict[int, bytes]):
    """Cache of each token's encoded entry in a response of Tokenize, made on first use. Most tokens occur many times,
    and an entry does not depend on its position."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        made = inference_pb2.TokenizeResponse()
        made.tokens.add(id=token_id, piece=self._pieces[token_id])
        entry = self[token_id] = made.SerializeToString()
        return entry
