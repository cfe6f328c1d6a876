"""Defines the records that ring messages carry: admission, timings, log probabilities, tokens, answers.

A record is always a field of a message and is never sent alone.
"""

import enum

import msgspec

from sluice_server.services.messages.work import Stops, TextOptions


class RoutingReason(enum.StrEnum):
    """Why a request goes to its engine."""

    CACHE = "cache"  # it holds more of the prompt than another
    LOAD = "load"  # it has less to do than another
    TURN = "turn"  # nothing tells the engines apart, or routing goes by turns
    SESSION = "session"  # requests of one session go to one engine
    PREFILL = "prefill"  # it computes prompts for others
    HAND_OFF = "hand-off"  # another engine has computed the prompt
    STAYED = "stayed"  # the attempt before was there
    HEDGE = "hedge"  # it was asked beside another engine, and brought a token sooner
    ONLY = "only"  # no other engine serves


class Routed(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Why a request goes to its engine, and what was expected there."""

    reason: RoutingReason
    num_cached: int = 0  # tokens of the prompt in its cache
    num_waiting: int = 0  # tokens of other prompts, to be computed before


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The engine's findings when it accepted the request; sent with the first `Tokens` of each output."""

    num_prompt: int
    num_cached: int  # prompt tokens whose keys and values were in the prefix cache
    max_tokens: int  # the effective limit
    stops: Stops
    text: TextOptions = TextOptions()
    resumed: bytes = b""  # ids (int32) that this output had before a resume: their text is not emitted again
    num_image: int = 0  # prompt tokens that stand for images
    routed: Routed | None = None  # if a tokenizer chose the engine


class Timings(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Durations in seconds, each filled in by the stage that measured it; sent with the last message of an output."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    detokenize_s: float = 0.0
    num_preemptions: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The log probability of one sampled token and of its alternatives.

    Natural logarithms, before temperature and truncation. `top_*` are the most likely alternatives; `asked_*` are the
    ids that the client listed.
    """

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
    scores: tuple[TokenLogprobs, ...]  # of the second token and all later ones


class TokenRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One token as the client sees it: bytes, because a token can be half a code point."""

    id: int
    piece: bytes
    logprobs: TokenLogprobs | None = None
    top_pieces: tuple[bytes, ...] = ()  # of `logprobs.top_ids`, then of `logprobs.asked_ids`


class Tokenized(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The answer to `Tokenize`: all ids, and the bytes of each distinct id once.

    There may be a million ids, with few distinct tokens among them.
    """

    ids: bytes  # little-endian int32
    pieces: dict[int, bytes]  # by id, for every id in `ids`
    num_tokens: int = 0  # where that alone was asked for, and `ids` is empty
    starts: bytes = b""  # where offsets were asked for: in code points of the text, as little-endian int32
    ends: bytes = b""
    text: str = ""  # that of a conversation


class Detokenized(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The answer to `Detokenize`."""

    text: str


class Scored(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt's tokens with their log probabilities."""

    tokens: tuple[TokenRecord, ...]


class Embedded(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The answer to `Embed`: for each input its vector, encoded as asked for, and its number of tokens."""

    vectors: tuple[bytes, ...]
    num_tokens: tuple[int, ...]
    num_cached: int  # tokens of all inputs whose keys and values were in the prefix cache
    timings: Timings


class AdapterState(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """An adapter that an engine has under a name; the answer to `LoadAdapter`."""

    name: str
    path: str  # below the folder of adapters
    digest: bytes
    rank: int  # the greatest of its modules
    modules: tuple[str, ...]  # names of the projections that it changes
    num_bytes: int
    is_pinned: bool = False
    in_slot: bool = False  # steps can be computed with it at once
    in_host: bool = False
    num_changes: int = 0  # to the engine's names, with this one: older reports know less


class AdapterDropped(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The answer to `DropAdapter`."""

    num_changes: int  # as in AdapterState


class CachedBlock(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A full block of an engine's prefix cache."""

    name: bytes
    parent: bytes  # name of the block before it; b"" for the first of a prompt
    tenant: str  # whose requests may use it
    ids: bytes  # its tokens (int32)


class RankLoad(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Seconds that a rank of an engine's group has spent since it started."""

    steps_s: float = 0.0
    sums_s: float = 0.0  # of these, in sums with other ranks, waiting included


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
    token_s: float = 0.0  # seconds that a token of a prompt takes; 0 while unknown
    ranks: tuple[RankLoad, ...] = ()  # of its group, from rank 0; none for an engine of one rank
