"""What is asked of the engine, and within which limits, as frozen values. `engine.checks` says whether it may be asked.

Stdlib only; knows nothing of tensors, sockets or text.
"""

import dataclasses
import enum
import math

from sluice_server.engine.timeline import RequestTimeline

MAX_PROMPT_BYTES = 1 << 20  # by default
MAX_DRAFT_TOKENS = 64  # of one sequence in one step
MAX_DRAFT_WIDTH = 8  # of these, that may follow the same token


class FinishReason(enum.StrEnum):
    """Why an output ended well. Anything else is a `ServiceError`."""

    LENGTH = "length"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    CANCELLED = "cancelled"  # this output was cancelled, others of its request went on


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a model and this server allow. One table, known to every stage.

    Attributes:
        context_length: tokens of prompt plus output that the model and the server's setting allow.
        vocab_size: width of the logits; every token id is below it.
        max_draft_tokens: drafted for one sequence in one step; 0 where nothing is drafted.
    """

    context_length: int
    vocab_size: int
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
    min_repetition_penalty: float = 1e-30  # logits of 3e8 divided by it are float32 still
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
    max_prompt_candidates: int = 1 << 20  # log probabilities of prompt tokens that one request may ask for, in all


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Effective sampling parameters: every default is filled in by the gateway before this is made.

    `engine.parameters` says what each means and what it may be; a value here is what it is where nobody says anything.

    Attributes:
        bad_words: sequences of ids of which none may be sampled whole; made by the tokenizer.
        grammar: what the output must look like, in llguidance's form; made by the tokenizer. Empty: anything.
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

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens that exist."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def has_bars(self) -> bool:
        """Whether anything may not be sampled."""
        return bool(self.bad_token_ids or self.bad_words)

    @property
    def needs_tokens(self) -> bool:
        """Whether what is sampled depends on more than the logits and its own position."""
        return self.has_penalties or bool(self.grammar or self.bad_words) or self.prompt_logprobs >= 0

    @property
    def is_search(self) -> bool:
        """Whether outputs are chosen, and emitted, only at the end."""
        return self.beam_width > 0 or self.best_of > self.n

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for it."""
        return max(self.n, self.best_of, self.beam_width)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine takes it.

    Attributes:
        request_id: 128 random bits in hex, made by the gateway.
        prompt_ids: the prompt's token ids, at least one.
        priority: higher is sooner.
        arrival_s: engine clock at arrival.
        deadline_s: engine clock after which nobody waits for it; infinity when there is none.
        cache_salt: keeps apart the prefixes of tenants, adapters and cache identities: part of the first block's hash.
        bypasses_cache: neither uses what others computed nor leaves anything behind.
        tenant: who pays; fair share and length prediction go by it.
        ttft_target_s: seconds to the first token that the client hopes for; infinity when it does not say.
        credit: tokens that may be sampled, over all outputs, before the first grant; None is without limit.
        is_open: more prompt may be appended: its prefill runs, sampling starts when the input is closed.
        resume_ids: per output, the tokens that were already received: it goes on behind them and emits none again;
            None for an output that has ended. Empty: every output starts from nothing.
        max_draft_tokens: tokens drafted per step at most, 0 for none; None is as the server decides.
        trail: where the scheduler notes what happens to it; None when nobody traces it.
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
    timeline: RequestTimeline | None = None
