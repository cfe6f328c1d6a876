"""Whether something may be asked of the engine: the one place that says so, by field, value and limit.

The same functions run at the gateway, the tokenizer and again at engine admission: the engine trusts nobody. Pure.
"""

from collections.abc import Sequence

from engine.errors import context_exceeded, invalid, unsupported
from engine.request import MAX_DRAFT_TOKENS, Limits, SamplingParams


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
    least, most = limits.min_repetition_penalty, limits.max_repetition_penalty
    _in_range("repetition_penalty", params.repetition_penalty, least, most)
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
    """Raise `ServiceError` for more than so many entries; how many is not known of a request that was cut short."""
    if num > most:
        raise invalid(field, f"has more than the {most} entries that are allowed", limit=most)


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
