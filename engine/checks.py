"""Checks of what a request may ask of the engine. Errors name field, value and limit.

The gateway, the tokenizer and engine admission all run these functions; the engine does not rely on earlier checks.
Pure.
"""

from collections.abc import Sequence

from sluice_server.engine.errors import context_exceeded, invalid, unsupported
from sluice_server.engine.images import DIGEST_BYTES, ImageForm, PromptImage
from sluice_server.engine.parameter_kinds import check_ids as check_ids
from sluice_server.engine.parameter_kinds import check_num as check_num
from sluice_server.engine.parameter_kinds import in_range
from sluice_server.engine.parameters import PARAMETERS, REPLACED
from sluice_server.engine.prompt_embeds import PLACEHOLDER, PromptEmbeds
from sluice_server.engine.request import MAX_DRAFT_TOKENS, AdapterRef, Limits, Pooling, ProcessorCall, SamplingParams

NEUTRAL = SamplingParams()
# With the value that leaves it out, which is in range under any limits: most are, and three stages check each request.
_ROWS = tuple((row, row.of, row.of(NEUTRAL)) for row in PARAMETERS)
SEES_PROMPT = "logits_processors and a strategy see a whole prompt: leave one of the two out"


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raises `ServiceError` INVALID_ARGUMENT naming the first field out of range, its value and its limit."""
    for row, of, unset in _ROWS:
        if of(params) != unset:
            row.check(params, limits)
    _check_bad_words(params, limits)
    if params.max_tokens and params.min_tokens > params.max_tokens:
        raise invalid("min_tokens", f"{params.min_tokens} is above max_tokens {params.max_tokens}")
    _check_logprobs(params)
    _check_beam(params)
    _check_processors(params, limits)
    _check_strategy(params, limits)
    if params.grammar:
        check_constrained(params)
        size, most = len(params.grammar), limits.max_grammar_bytes
        if size > most:
            raise invalid("constraint", f"makes a grammar of {size} characters; at most {most}", limit=most)


def check_constrained(params: SamplingParams) -> None:
    """Raises `ServiceError` for parameters that cannot be combined with a constraint."""
    if params.beam_width:
        raise unsupported("constraint", "constraint is not supported together with sampling.beam: leave one out")
    if params.ignore_eos:
        raise invalid("stop.ignore_eos", "a constrained output ends with the model's end of sequence: leave it out")
    if params.allowed_token_ids:
        raise invalid("allowed_token_ids", "a constraint says what may be sampled: leave one of the two out")


def _check_logprobs(params: SamplingParams) -> None:
    """Checks the combination of log-probability parameters."""
    if params.logprob_token_ids and params.logprobs < 0:
        raise invalid("logprob_token_ids", "are reported with `logprobs`: set it, to 0 if nothing else is wanted")
    if params.logprob_token_ids and params.beam_width:
        raise invalid("logprob_token_ids", "a beam search reports its candidates only: leave it out")


def _check_bad_words(params: SamplingParams, limits: Limits) -> None:
    """Checks the bad words: each is tokenized in two ways at most, with a space before it and without."""
    most = 2 * limits.max_bad_words
    if len(params.bad_words) > most:
        raise invalid("bad_words", f"{len(params.bad_words)} sequences of ids; at most {most}", limit=most)
    for at, ids in enumerate(params.bad_words):
        if not 1 <= len(ids) <= limits.max_bad_word_bytes + 1:
            raise invalid(f"bad_words[{at}]", f"has {len(ids)} ids; 1 to {limits.max_bad_word_bytes + 1} are allowed")
        check_ids(f"bad_words[{at}]", ids, limits)


def _check_processors(params: SamplingParams, limits: Limits) -> None:
    """Checks which logits processors are asked for, and the size of their arguments."""
    field, calls = "sampling.logits_processors", params.logits_processors
    if not calls:
        return
    if not limits.logits_processors:
        raise unsupported(field, f"{field}: this server was started without any (--plugins): leave it out")
    check_num(field, len(calls), limits.max_logits_processors)
    for at, call in enumerate(calls):
        if call.name not in limits.logits_processors:
            known = ", ".join(limits.logits_processors)
            raise invalid(f"{field}[{at}].name", f"{call.name[:80]!r} is not served; there are {known}")
        _check_arguments(f"{field}[{at}].arguments", call, limits)
    if params.beam_width:
        raise invalid("beam", "a beam search ranks by the model's own probabilities: leave logits_processors out")


def _check_strategy(params: SamplingParams, limits: Limits) -> None:
    """Checks which sampling strategy is asked for, the size of its arguments, and what it takes the place of."""
    field, call = "sampling.strategy", params.strategy
    if call is None:
        return
    if not limits.sampling_strategies:
        raise unsupported(field, f"{field}: this server was started without any (--plugins): leave it out")
    if call.name not in limits.sampling_strategies:
        known = ", ".join(limits.sampling_strategies)
        raise invalid(f"{field}.name", f"{call.name[:80]!r} is not served; there are {known}")
    _check_arguments(f"{field}.arguments", call, limits)
    if params.beam_width:
        raise invalid("beam", "a beam search ranks by the model's own probabilities: leave the strategy out")
    for row in REPLACED:
        if row.of(params) != row.of(NEUTRAL):
            raise invalid(
                row.name, f"the sampling strategy {call.name!r} chooses in its place: leave one of the two out"
            )


def _check_arguments(field: str, call: ProcessorCall, limits: Limits) -> None:
    check_num(field, len(call.arguments), limits.max_processor_arguments)
    size = sum(len(name.encode()) + len(value.encode()) for name, value in call.arguments)
    most = limits.max_processor_argument_bytes
    if size > most:
        raise invalid(field, f"have {size} bytes; at most {most}", limit=most, actual=size)


def _check_beam(params: SamplingParams) -> None:
    """Checks the combination of a beam search with other parameters."""
    if not params.beam_width:
        return
    if params.n > params.beam_width:
        raise invalid("n", f"{params.n} is above beam.width {params.beam_width}", limit=params.beam_width)
    if params.best_of > params.n:
        raise invalid("best_of", "a beam search returns its n best hypotheses: leave best_of out")
    if params.has_penalties or params.logit_bias or params.allowed_token_ids or params.has_banned_tokens:
        raise invalid("beam", "a beam search ranks by the model's own probabilities: leave penalties and biases out")


def check_prompt(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    """Raises `ServiceError` if a prompt of `num_tokens` is empty or too long for the tokens to generate.

    Also if its log probabilities are requested and there would be more than `limits.max_prompt_candidates`.
    """
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


def check_pooled(num_tokens: int, limits: Limits, field: str = "prompt") -> None:
    """Raises `ServiceError` if a prompt of `num_tokens` after which nothing is generated is empty or too long."""
    if num_tokens == 0:
        raise invalid(field, "has no tokens; send at least one")
    if num_tokens > limits.context_length:
        text = f"{field} has {num_tokens} tokens; this model allows {limits.context_length}"
        raise context_exceeded(num_tokens, limits.context_length, text, field)


def check_pooling(pooling: Pooling, limits: Limits) -> None:
    """Raises `ServiceError` if the model's hidden states cannot be pooled in that way."""
    if pooling in limits.poolings:
        return
    name = pooling.name
    known = " or ".join(one.name for one in limits.poolings if one is not Pooling.CLASSES)
    why = {
        Pooling.FIRST: "whose first token sees no other one",
        Pooling.CLASSES: "which has no classification head",
    }.get(pooling, "which pools in another way")
    raise unsupported("pooling", f"pooling {name} is not supported by this model, {why}: take {known}")


def check_generates(generates: bool) -> None:
    """Raises `ServiceError` unless the model generates tokens."""
    if not generates:
        raise unsupported("Generate", "Generate is not supported with this model, which has no head: ask for vectors")


def check_priority(priority: int, limits: Limits) -> None:
    """Raises `ServiceError` if the priority is outside ±`limits.max_priority`."""
    in_range("priority", priority, -limits.max_priority, limits.max_priority)


def check_draft_tokens(num: int) -> None:
    """Raises `ServiceError` if `num` is outside 0 … `MAX_DRAFT_TOKENS`; 0 is no drafts."""
    in_range("speculation.max_tokens", num, 0, MAX_DRAFT_TOKENS)


def check_credit(credit: int, limits: Limits, field: str = "credit") -> None:
    """Raises `ServiceError` if `credit` is negative or above `limits.max_credit`."""
    in_range(field, credit, 0, limits.max_credit)


def effective_max_tokens(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """Returns the tokens that a request may generate: its own limit, or all that the context leaves."""
    return params.max_tokens or limits.context_length - num_prompt


def check_embeds(embeds: PromptEmbeds, limits: Limits, field: str = "prompt_embeds") -> None:
    """Raises ServiceError if prompt embeddings are off, or differ from what the model takes."""
    width = limits.embeds_width
    if not width:
        raise unsupported(field, f"{field}: this server does not take prompt embeddings: send text or token ids")
    num, most = embeds.num_tokens, limits.context_length
    if not 1 <= num <= most:
        raise invalid(f"{field}.num_tokens", f"is {num}; 1 to {most} are allowed", limit=most, actual=num)
    expected, actual = num * width * embeds.dtype.size, len(embeds.values)
    if actual > limits.max_embeds_bytes:
        text = f"have {actual} bytes; at most {limits.max_embeds_bytes}"
        raise invalid(f"{field}.values", text, limit=limits.max_embeds_bytes, actual=actual)
    if actual != expected:
        text = f"have {actual} bytes; {num} rows of {width} numbers in {embeds.dtype} are {expected}"
        raise invalid(f"{field}.values", text, limit=expected, actual=actual)
    if not embeds.is_finite:
        raise invalid(f"{field}.values", "hold a number that is not finite: send finite ones")


def check_placeholders(embeds: PromptEmbeds, ids: Sequence[int]) -> None:
    """Raises `ServiceError` if `ids` do not begin with a place for each row."""
    num = embeds.num_tokens
    if tuple(ids[:num]) != (PLACEHOLDER,) * num:
        raise invalid("prompt_embeds", f"the prompt does not begin with {num} ids {PLACEHOLDER} in the rows' place")


def check_adapter(adapter: AdapterRef, limits: Limits) -> None:
    """Raises `ServiceError` if requests may not name adapters, or for a digest that is none."""
    check_takes_adapters(limits)
    if len(adapter.digest) != DIGEST_BYTES:
        raise invalid("adapter", f"its digest has {len(adapter.digest)} bytes; it must have {DIGEST_BYTES}")


def check_takes_adapters(limits: Limits) -> None:
    """Raises `ServiceError` if requests may not name adapters."""
    if not limits.max_adapters:
        raise unsupported("adapter", "adapter: this server was not started with --max-adapters: leave it out")


def check_num_images(num: int, limits: Limits, field: str) -> ImageForm:
    """Returns the form of images. Raises `ServiceError` if images are off, or for more than a request may bring."""
    form = limits.images
    if form is None:
        raise unsupported(
            field, f"{field}: this server does not take images, because {limits.why_no_images}: send text"
        )
    if num > form.max_images:
        raise invalid(field, f"are {num}; at most {form.max_images} are allowed", limit=form.max_images, actual=num)
    return form


def check_images(images: Sequence[PromptImage], ids: Sequence[int], limits: Limits, field: str = "images") -> None:
    """Raises `ServiceError` if images are off, are not as the model takes them, or have no place in the prompt."""
    form = check_num_images(len(images), limits, field)
    behind, places = 0, 0
    for index, image in enumerate(images):
        check_image(image, form, ids, behind, f"{field}[{index}]")
        behind, places = image.end, places + form.ids(image.grid).count(form.token_id)
    if form.is_whole and images and images[-1].end == len(ids):  # its last token may have to wait, and it is not cut
        raise invalid(f"{field}[{len(images) - 1}]", "ends the prompt; text must follow an image")
    if (actual := tuple(ids).count(form.token_id)) != places:
        raise invalid("prompt", f"has {actual} ids {form.token_id}, which stand for images; those sent take {places}")


def check_image(image: PromptImage, form: ImageForm, ids: Sequence[int], behind: int, name: str) -> None:
    """Raises `ServiceError` if an image is not as the model takes it, or has no place in the prompt behind `behind`."""
    if not form.has(image.grid):
        most = f"has {form.grid}" if form.grid is not None else f"may have {form.most_tokens} tokens"
        raise invalid(f"{name}.grid", f"is {image.grid}; an image of this model {most}", limit=form.most_tokens)
    num, num_bytes = form.num_tokens(image.grid), form.num_bytes(image.grid)
    if len(image.pixels) != num_bytes:
        text = f"have {len(image.pixels)} bytes; the model takes {num_bytes}"
        raise invalid(f"{name}.pixels", text, limit=num_bytes, actual=len(image.pixels))
    if len(image.digest) != DIGEST_BYTES:
        raise invalid(f"{name}.digest", f"has {len(image.digest)} bytes; it must have {DIGEST_BYTES}")
    if image.num_tokens != num or image.first < behind:
        text = f"has {image.num_tokens} tokens from position {image.first} on; images have {num}, and "
        raise invalid(name, text + f"this one may begin at {behind}")
    if tuple(ids[image.first : image.end]) != form.ids(image.grid):
        raise invalid(name, f"the prompt has not {num} ids {form.token_id} of an image from position {image.first} on")


def check_embeds_use(params: SamplingParams) -> None:
    """Raises `ServiceError` if the parameters of a request with prompt embeddings read the prompt's token ids."""
    asks = {
        "repetition_penalty": (params.repetition_penalty != 1.0, "set it to 1"),  # the model's default may differ
        "prompt_logprobs": (params.prompt_logprobs >= 0, "leave it out"),
        "logits_processors": (bool(params.logits_processors), "leave it out"),
        "strategy": (params.strategy is not None, "leave it out"),
    }
    for field, instead in ((name, instead) for name, (is_asked, instead) in asks.items() if is_asked):
        raise unsupported(field, f"{field} reads the prompt's token ids, and prompt embeddings have none: {instead}")
