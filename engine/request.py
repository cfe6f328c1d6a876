"""What is asked of the engine, as frozen values, and the one function that says whether it may be asked.

`check_params` and `check_prompt` run at the gateway, the tokenizer and again at engine admission: the engine trusts
nobody. Stdlib only; knows nothing of tensors, sockets or text.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

from engine.errors import context_exceeded, invalid, unsupported

MAX_DRAFT_TOKENS = 64  # of one sequence in one step


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
    max_prompt_bytes: int = 1 << 20
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

    Attributes:
        max_tokens: tokens to generate at most; 0 means as many as the context allows.
        min_tokens: end-of-sequence and stop ids are barred until so many tokens exist.
        temperature: 0 is greedy.
        top_k: keep the k most likely; 0 keeps all.
        top_p: keep the smallest set whose mass reaches p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely; 0 keeps all.
        typical_p: keep the locally typical set of mass p; 1 keeps all.
        presence_penalty: taken off the logit of every token that the output has.
        frequency_penalty: taken off the logit once for each occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is none.
        logit_bias: (id, value) pairs, added to the logits.
        allowed_token_ids: the only ids that may be sampled; empty allows all.
        bad_token_ids: ids that may not be sampled.
        bad_words: sequences of ids of which none may be sampled whole; made by the tokenizer.
        seed: 64-bit key of the counter-based noise.
        stop_token_ids: ids that end the output (FinishReason.STOP_TOKEN).
        ignore_eos: go on after the model's end-of-sequence ids.
        logprobs: candidates to report per token; -1 reports none, 0 only the chosen token's.
        logprob_token_ids: ids to report besides, wherever `logprobs` are.
        prompt_logprobs: candidates to report per prompt token; -1 reports none, 0 only the token's own.
        n: outputs to return; each samples with noise of its own index.
        best_of: outputs to sample, of which the n with the highest mean log probability are returned; 0 is n.
        beam_width: hypotheses kept per step of a beam search over raw log probabilities; 0 samples instead.
        length_penalty: exponent of the length by which a hypothesis' score is divided.
        early_stopping: end a beam search as soon as `beam_width` hypotheses are complete.
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
        cache_salt: keeps tenants' prefixes apart (and model revisions and adapters): part of the first block's hash.
        bypasses_cache: neither uses what others computed nor leaves anything behind.
        tenant: who pays; fair share and length prediction go by it.
        ttft_target_s: seconds to the first token that the client hopes for; infinity when it does not say.
        credit: tokens that may be sampled, over all outputs, before the first grant; None is without limit.
        is_open: more prompt may be appended: its prefill runs, sampling starts when the input is closed.
        resume_ids: per output, the tokens that were already received: it goes on behind them and emits none again;
            None for an output that has ended. Empty: every output starts from nothing.
        max_draft_tokens: tokens drafted per step at most, 0 for none; None is as the server decides.
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


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raise `ServiceError` INVALID_ARGUMENT naming the first field out of range, its value and its limit."""
    _in_range("max_tokens", params.max_tokens, 0, limits.context_length)
    _in_range("min_tokens", params.min_tokens, 0, limits.context_length)
    if params.max_tokens and params.min_tokens > params.max_tokens:
        raise invalid("min_tokens", f"{params.min_tokens} is above max_tokens {params.max_tokens}")
    _in_range("temperature", params.temperature, 0.0, limits.max_temperature)
    _in_range("top_k", params.top_k, 0, 2**31 - 1)
    if not 0.0 < params.top_p <= 1.0:  # also refuses NaN
        raise invalid("top_p", f"{params.top_p} is not in (0, 1]")
    _in_range("min_p", params.min_p, 0.0, 1.0)
    if not 0.0 < params.typical_p <= 1.0:
        raise invalid("typical_p", f"{params.typical_p} is not in (0, 1]")
    _check_adjustments(params, limits)
    _in_range("seed", params.seed, 0, 2**64 - 1)
    _check_logprobs(params, limits)
    if len(params.stop_token_ids) > limits.max_stop_token_ids:
        raise invalid("stop_token_ids", f"{len(params.stop_token_ids)} ids; at most {limits.max_stop_token_ids}")
    check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_outputs(params, limits)
    if params.grammar:
        check_constrained(params)
        size, most = len(params.grammar), limits.max_grammar_bytes
        if size > most:
            raise invalid("constraint", f"makes a grammar of {size} characters; at most {most}", limit=most)


def check_constrained(params: SamplingParams) -> None:
    """Raise `ServiceError` for what does not go with a constraint."""
    if params.beam_width:
        raise unsupported("constraint", "constraint is not supported together with sampling.beam: leave one out")
    if params.ignore_eos:
        raise invalid("stop.ignore_eos", "a constrained output ends with the model's end of sequence: leave it out")
    if params.allowed_token_ids:
        raise invalid("allowed_token_ids", "a constraint says what may be sampled: leave one of the two out")


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    """What is reported of tokens."""
    _in_range("logprobs", params.logprobs, -1, limits.max_logprobs)
    _in_range("prompt_logprobs", params.prompt_logprobs, -1, limits.max_logprobs)
    _check_set("logprob_token_ids", params.logprob_token_ids, limits.max_logprob_token_ids, limits)
    if params.logprob_token_ids and params.logprobs < 0:
        raise invalid("logprob_token_ids", "are reported with `logprobs`: set it, to 0 if nothing else is wanted")
    if params.logprob_token_ids and params.beam_width:
        raise invalid("logprob_token_ids", "a beam search reports its candidates only: leave it out")


def _check_adjustments(params: SamplingParams, limits: Limits) -> None:
    """Changes of single logits. Sizes are looked at before contents."""
    _in_range("presence_penalty", params.presence_penalty, -limits.max_penalty, limits.max_penalty)
    _in_range("frequency_penalty", params.frequency_penalty, -limits.max_penalty, limits.max_penalty)
    if not 0.0 < params.repetition_penalty <= limits.max_repetition_penalty:
        most = limits.max_repetition_penalty
        raise invalid("repetition_penalty", f"{params.repetition_penalty} is not in (0, {most}]", limit=most)
    check_num("logit_bias", len(params.logit_bias), limits.max_logit_biases)
    ids = [token for token, _ in params.logit_bias]
    _check_set("logit_bias", ids, limits.max_logit_biases, limits)
    for token, value in params.logit_bias:
        _in_range(f"logit_bias[{token}]", value, -limits.max_logit_bias, limits.max_logit_bias)
    _check_set("allowed_token_ids", params.allowed_token_ids, limits.max_allowed_token_ids, limits)
    _check_set("bad_token_ids", params.bad_token_ids, limits.max_bad_token_ids, limits)
    _check_bad_words(params, limits)


def _check_set(field: str, ids: Sequence[int], most: int, limits: Limits) -> None:
    """Distinct ids, not too many; the size is looked at before the contents."""
    check_num(field, len(ids), most)
    check_ids(field, ids, limits)
    if len(set(ids)) < len(ids):
        raise invalid(field, "names an id twice")


def _check_bad_words(params: SamplingParams, limits: Limits) -> None:
    """A word is written in two ways at most, with a space before it and without."""
    most = 2 * limits.max_bad_words
    if len(params.bad_words) > most:
        raise invalid("bad_words", f"{len(params.bad_words)} sequences of ids; at most {most}", limit=most)
    for at, ids in enumerate(params.bad_words):
        if not 1 <= len(ids) <= limits.max_bad_word_bytes + 1:
            raise invalid(f"bad_words[{at}]", f"has {len(ids)} ids; 1 to {limits.max_bad_word_bytes + 1} are allowed")
        check_ids(f"bad_words[{at}]", ids, limits)


def _check_outputs(params: SamplingParams, limits: Limits) -> None:
    """How many outputs, and how they are searched for."""
    _in_range("n", params.n, 1, limits.max_outputs)
    if params.best_of:
        _in_range("best_of", params.best_of, params.n, limits.max_outputs)
    _in_range("length_penalty", params.length_penalty, -limits.max_length_penalty, limits.max_length_penalty)
    if not params.beam_width:
        return
    _in_range("beam.width", params.beam_width, 2, limits.max_beam_width)
    if params.n > params.beam_width:
        raise invalid("n", f"{params.n} is above beam.width {params.beam_width}", limit=params.beam_width)
    if params.best_of > params.n:
        raise invalid("best_of", "a beam search returns its n best hypotheses: leave best_of out")
    if params.has_penalties or params.logit_bias or params.allowed_token_ids or params.has_bars:
        raise invalid("beam", "a beam search ranks by the model's own probabilities: leave penalties and biases out")


def check_prompt(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    """Raise `ServiceError` when a prompt of `num_tokens` is empty or leaves no room for what is to be generated."""
    if num_tokens == 0:
        raise invalid("prompt", "has no tokens; send at least one")
    num_candidates, most = num_tokens * (params.prompt_logprobs + 1), limits.max_prompt_candidates
    if num_candidates > most:
        raise invalid(
            "prompt_logprobs",
            f"{params.prompt_logprobs} besides the token's own, of {num_tokens} tokens: at most {most} in all",
            limit=most,
        )
    needed = max(params.max_tokens, params.min_tokens, 1)
    if num_tokens + needed > limits.context_length:
        raise context_exceeded(
            num_tokens + needed,
            limits.context_length,
            f"prompt has {num_tokens} tokens; this model allows {limits.context_length} minus the {needed} to generate",
        )


def check_priority(priority: int, limits: Limits) -> None:
    """Raise `ServiceError` when the priority is outside ±`limits.max_priority`."""
    _in_range("priority", priority, -limits.max_priority, limits.max_priority)


def check_draft_tokens(num: int) -> None:
    """Raise `ServiceError` when no step drafts so many tokens; 0 is none."""
    _in_range("speculation.max_tokens", num, 0, MAX_DRAFT_TOKENS)


def check_credit(credit: int, limits: Limits, field: str = "credit") -> None:
    """Raise `ServiceError` when so much credit may not be had at once."""
    _in_range(field, credit, 0, limits.max_credit)


def check_num(field: str, num: int, most: int) -> None:
    """Raise `ServiceError` for more than so many entries."""
    if num > most:
        raise invalid(field, f"{num} entries; at most {most}", limit=most, actual=num)


def check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    """Raise `ServiceError` naming the first id outside the width of the logits (not the tokenizer's size)."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        at, value = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        raise invalid(f"{field}[{at}]", f"{value} is not in [0, {limits.vocab_size})", limit=limits.vocab_size)


def effective_max_tokens(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """Tokens this request may generate: its own bound, or all that the context leaves."""
    return params.max_tokens or limits.context_length - num_prompt


def _in_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # written so that NaN fails
        raise invalid(field, f"{value} is not in [{low}, {high}]", limit=high if value > high else low)
