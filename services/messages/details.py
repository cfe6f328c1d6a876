"""What messages of the ring carry: how a request was taken and how long it took, tokens as a client sees them, answers.

Records and no messages: none travels alone.
"""

import msgspec

from sluice_server.services.messages.work import Stops, TextOptions


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What the engine found when it took the request; rides on its first Tokens."""

    num_prompt: int
    num_cached: int  # prompt tokens whose keys and values were in the prefix cache
    max_tokens: int  # effective
    stops: Stops
    text: TextOptions = TextOptions()
    resumed: bytes = b""  # ids of this output (int32) that came before: their text was emitted, and is not again


class Timings(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Durations in seconds, filled in by the stage that measured them; ride on the last message of a request."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    detokenize_s: float = 0.0
    num_preemptions: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Log probability (natural) of one sampled token, before temperature and truncation, and its best rivals."""

    logprob: float
    rank: int  # 1 is the most likely
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked_ids: tuple[int, ...] = ()
    asked_logprobs: tuple[float, ...] = ()
    asked_ranks: tuple[int, ...] = ()


class PromptScores(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The log probabilities of a prompt's tokens."""

    ids: bytes  # little-endian int32
    scores: tuple[TokenLogprobs, ...]  # from the second token on


class TokenRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One token as the client sees it; bytes, because a token can be half a code point."""

    id: int
    piece: bytes
    logprobs: TokenLogprobs | None = None
    top_pieces: tuple[bytes, ...] = ()  # of the rivals, then of the ids asked for


class Tokenized(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Answer to Tokenize: each token's bytes once, as there may be a million ids, of few tokens."""

    ids: bytes  # little-endian int32
    pieces: dict[int, bytes]  # of every id among them


class Detokenized(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Answer to Detokenize."""

    text: str


class Scored(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt's tokens with their log probabilities."""

    tokens: tuple[TokenRecord, ...]


class Load(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """An engine's load."""

    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or reclaimable
    block_size: int = 0
    step_s: float = 0.0  # mean of recent steps
    tokens_per_s: float = 0.0
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
