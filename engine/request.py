"""Requests to the engine and their limits, as frozen values. `engine.checks` validates them.

Stdlib only: no tensors, sockets or text.
"""

import dataclasses
import enum
import math

from sluice_server.engine.images import ImageForm, PromptImage
from sluice_server.engine.prompt_embeds import PromptEmbeds
from sluice_server.engine.timeline import RequestTimeline

MAX_PROMPT_BYTES = 1 << 20  # default of `Limits`
MAX_EMBEDS_BYTES = 8 << 20  # of a request: they are checked in the engine's loop, number by number
MAX_DRAFT_TOKENS = 64  # per sequence and step
MAX_DRAFT_WIDTH = 8  # drafts that may follow the same token


class FinishReason(enum.StrEnum):
    """The reason why an output ended without an error. Anything else is a `ServiceError`."""

    LENGTH = "length"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    CANCELLED = "cancelled"  # this output was cancelled; others of its request continued
    TOOL_CALL = "tool_call"  # its first tool call, of a request that allows one


ENDED_BY_TEXT = frozenset([FinishReason.STOP_STRING, FinishReason.TOOL_CALL])  # found in the text; the engine goes on


class Pooling(enum.StrEnum):
    """How the hidden states of a prompt's tokens are pooled to one vector."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # their mean
    CLASSES = "classes"  # what the classification head makes of them
    FIRST = "first"  # the first token's, of an encoder


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model and this server. All stages use this table.

    Attributes:
        context_length: tokens of prompt plus output that the model and the server's setting allow.
        vocab_size: width of the logits; every token id is below it.
        generates: whether the model generates tokens.
        poolings: how the model's hidden states can be pooled.
        max_draft_tokens: drafts per sequence and step; 0 without speculation.
        logits_processors, sampling_strategies: names of those that requests may ask for.
        max_processor_arguments, max_processor_argument_bytes: of one processor or strategy.
        embeds_width: numbers in a row of prompt embeddings; 0 where requests may not bring any.
        max_embeds_bytes: of the prompt embeddings of a request.
        images: the form of images; None where requests may not bring any.
        why_no_images: why they may not.
        max_adapters: adapters that running requests may have at once on a GPU, while a CPU computes with all that are
            in host memory; 0 where requests may not name any.
    """

    context_length: int
    vocab_size: int
    generates: bool = True
    poolings: tuple[Pooling, ...] = (Pooling.LAST, Pooling.MEAN, Pooling.CLASSES)
    max_prompt_bytes: int = MAX_PROMPT_BYTES
    max_logprobs: int = 20
    max_stop_strings: int = 32
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_priority: int = 1000
    max_outputs: int = 128
    max_beam_width: int = 32
    max_length_penalty: float = 10.0
    max_credit: int = 1 << 20
    max_temperature: float = 100.0
    max_penalty: float = 2.0
    min_repetition_penalty: float = 1e-30  # a logit of 3e8 divided by it is still finite in float32
    max_repetition_penalty: float = 100.0
    max_logit_biases: int = 1024
    max_logit_bias: float = 100.0
    max_allowed_token_ids: int = 4096
    max_grammar_bytes: int = 1 << 20
    max_draft_tokens: int = 0
    max_bad_token_ids: int = 4096
    max_bad_words: int = 64
    max_bad_word_bytes: int = 128
    max_logprob_token_ids: int = 32
    max_prompt_candidates: int = 1 << 20  # log probabilities of prompt tokens per request, in all
    logits_processors: tuple[str, ...] = ()
    sampling_strategies: tuple[str, ...] = ()
    max_logits_processors: int = 8
    max_processor_arguments: int = 32
    max_processor_argument_bytes: int = 4096
    embeds_width: int = 0
    max_embeds_bytes: int = MAX_EMBEDS_BYTES
    images: ImageForm | None = None
    why_no_images: str = "the model takes text only"
    max_adapters: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as a request names it: complete, so that any engine can read it, also one that was just started.

    Attributes:
        digest: of its files; 32 bytes. Equal digests mean equal adapters.
        path: of its folder, below the folder of adapters.
        num_bytes: that it takes in memory.
    """

    digest: bytes
    path: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorCall:
    """A logits processor or sampling strategy that a request asks for; its arguments are sorted by name."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Effective sampling parameters, with every default filled in by the gateway.

    `engine.parameters` has the meaning and range of each; a default here is the value of a parameter that is not set.

    Attributes:
        bad_words: sequences of ids that may not be sampled as a whole; made by the tokenizer.
        grammar: constraint of the output in llguidance's form; made by the tokenizer. Empty for none.
        logits_processors: what changes the logits before anything else does, in this order.
        strategy: what chooses the tokens; None for the choice by temperature, top_k and the like.
    """

    max_tokens: int = 0
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    n: int = 1
    best_of: int = 0
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    grammar: str = ""
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int = -1
    logits_processors: tuple[ProcessorCall, ...] = ()
    strategy: ProcessorCall | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the existing tokens."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def has_banned_tokens(self) -> bool:
        """Whether any tokens are banned."""
        return bool(self.bad_token_ids or self.bad_words)

    @property
    def needs_tokens(self) -> bool:
        """Whether sampling depends on more than the logits and the position."""
        asks = bool(self.grammar or self.bad_words or self.logits_processors or self.strategy)
        return self.has_penalties or asks or self.prompt_logprobs >= 0

    @property
    def is_search(self) -> bool:
        """Whether outputs are chosen, and emitted, only at the end."""
        return self.beam_width > 0 or self.best_of > self.n

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run at the same time."""
        return max(self.n, self.best_of, self.beam_width)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine receives it.

    Attributes:
        request_id: 128 random bits in hex, made by the gateway.
        prompt_ids: the prompt's token ids, at least one.
        params: the effective sampling parameters.
        priority: higher is sooner.
        arrival_s: engine clock at arrival.
        deadline_s: engine clock after which the request fails; infinity for none.
        cache_salt: separates the prefixes of tenants, adapters and cache identities: part of the first block's hash.
        bypasses_cache: neither uses cached prefixes nor adds any.
        tenant: the tenant for fair share and length prediction.
        ttft_target_s: desired seconds to the first token; infinity when not set.
        credit: tokens that may be sampled, over all outputs, before the first grant; None is without limit.
        is_open: more prompt may be appended: its prefill runs, sampling starts when the input is closed.
        resume_ids: per output, the tokens that the client already received: the output continues behind them and does
            not emit them again; None for an output that has ended. Empty: every output starts from nothing.
        max_draft_tokens: drafts per step at most, 0 for none; None leaves it to the server.
        pooling: how its hidden states are pooled: the answer is a vector, and nothing is sampled. None: tokens are.
        num_first: tokens of the first of two texts that are pooled as one, for encoders that tell them apart; None
            where there is one text.
        prompt_embeds: the embeddings of the first tokens of the prompt, whose ids are then placeholders; None: those
            of the model.
        images: those of the prompt, in their order; the rows that the vision tower computes take the place of the
            embeddings of their tokens.
        adapter: the adapter that it is computed with; None for the base.
        timeline: receives the request's events from the scheduler; None when it is not traced.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    cache_salt: bytes = b""
    bypasses_cache: bool = False
    tenant: str = ""
    ttft_target_s: float = math.inf
    credit: int | None = None
    is_open: bool = False
    resume_ids: tuple[tuple[int, ...] | None, ...] = ()
    max_draft_tokens: int | None = None
    pooling: Pooling | None = None
    num_first: int | None = None
    prompt_embeds: PromptEmbeds | None = None
    images: tuple[PromptImage, ...] = ()
    adapter: AdapterRef | None = None
    timeline: RequestTimeline | None = None
