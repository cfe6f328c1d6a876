"""The table of sampling parameters: one row each, from which everything else about them is derived.

Derived are: their checks (`engine.checks`), defaults from a model (`engine.models`), the conversion of request fields
(the gateway, its adapters and the command line), the columns of a slot (`COLUMNS`), and their documentation. Other
defaults are those of `SamplingParams`. `grammar` and `bad_words`, which the tokenizer makes from texts, and
`logits_processors` and `strategy` have no row. Stdlib only.
"""

from sluice_server.engine.parameter_kinds import Biases, Flag, Ids, Number, Parameter, above_zero, signed

# How the tokens of an output are chosen, and how many.
CHOICE: tuple[Number, ...] = (
    Number(
        "max_tokens",
        lambda params: params.max_tokens,
        "the most tokens to generate",
        low=0,
        high=lambda _, limits: limits.context_length,
        off=0,
        absent="as many as the context leaves",
    ),
    Number(
        "min_tokens",
        lambda params: params.min_tokens,
        "the fewest tokens to generate: before, no end-of-sequence or stop id is sampled; at most max_tokens",
        low=0,
        high=lambda _, limits: limits.context_length,
    ),
    Number(
        "temperature",
        lambda params: params.temperature,
        "0 is greedy; higher is flatter",
        low=0.0,
        high=lambda _, limits: limits.max_temperature,
        from_model=True,
        dtype="float32",
        kept=above_zero,
    ),
    Number(
        "top_k",
        lambda params: params.top_k,
        "keep the k most likely tokens; 0 keeps all",
        low=0,
        high=2**31 - 1,
        from_model=True,
        dtype="int64",
    ),
    Number(
        "top_p",
        lambda params: params.top_p,
        "keep the smallest set whose mass reaches p; 1 keeps all",
        low=0.0,
        high=1.0,
        is_above=True,
        from_model=True,
        dtype="float32",
        kept=above_zero,
    ),
    Number(
        "min_p",
        lambda params: params.min_p,
        "drop tokens less likely than this times the most likely; 0 keeps all",
        low=0.0,
        high=1.0,
        from_model=True,
        dtype="float32",
    ),
    Number(
        "typical_p",
        lambda params: params.typical_p,
        "keep the locally typical set of mass p; 1 keeps all",
        low=0.0,
        high=1.0,
        is_above=True,
        from_model=True,
        dtype="float32",
        kept=above_zero,
    ),
    Number(
        "presence_penalty",
        lambda params: params.presence_penalty,
        "subtracted from the logit of every token that the output contains",
        low=lambda _, limits: -limits.max_penalty,
        high=lambda _, limits: limits.max_penalty,
    ),
    Number(
        "frequency_penalty",
        lambda params: params.frequency_penalty,
        "subtracted from the logit once for each occurrence in the output",
        low=lambda _, limits: -limits.max_penalty,
        high=lambda _, limits: limits.max_penalty,
    ),
    Number(
        "repetition_penalty",
        lambda params: params.repetition_penalty,
        "divides positive and multiplies negative logits of tokens in prompt or output; 1 has no effect",
        low=lambda _, limits: limits.min_repetition_penalty,
        high=lambda _, limits: limits.max_repetition_penalty,
        from_model=True,
    ),
    Number(
        "seed",
        lambda params: params.seed,
        "key of the random numbers",
        low=0,
        high=2**64 - 1,
        absent="drawn by the server and reported",
        dtype="int64",
        kept=signed,
    ),
)

# What is reported of tokens besides their text.
REPORTS: tuple[Number, ...] = (
    Number(
        "logprobs",
        lambda params: params.logprobs,
        "most likely candidates to report at each token; 0 reports the chosen token's log probability only",
        low=-1,
        high=lambda _, limits: limits.max_logprobs,
        path="output.logprobs",
        off=-1,
        absent="none",
    ),
    Number(
        "prompt_logprobs",
        lambda params: params.prompt_logprobs,
        "most likely candidates to report at each token of the prompt",
        low=-1,
        high=lambda _, limits: limits.max_logprobs,
        path="output.prompt_logprobs",
        off=-1,
        absent="none",
    ),
)

# How many outputs, and how they are searched for.
OUTPUTS: tuple[Number, ...] = (
    Number(
        "n",
        lambda params: params.n,
        "outputs to return",
        low=1,
        high=lambda _, limits: limits.max_outputs,
    ),
    Number(
        "best_of",
        lambda params: params.best_of,
        "outputs to sample, of which the n with the highest mean log probability are returned; at least n",
        low=lambda params, _: params.n,
        high=lambda _, limits: limits.max_outputs,
        off=0,
        absent="n",
    ),
    Number(
        "length_penalty",
        lambda params: params.length_penalty,
        "beam search: exponent of the length by which a hypothesis' score is divided",
        low=lambda _, limits: -limits.max_length_penalty,
        high=lambda _, limits: limits.max_length_penalty,
        path="sampling.beam.length_penalty",
    ),
    Number(
        "beam_width",
        lambda params: params.beam_width,
        "beam search: hypotheses kept per step",
        low=2,
        high=lambda _, limits: limits.max_beam_width,
        path="sampling.beam.width",
        off=0,
        absent="tokens are sampled",
        said="beam.width",
    ),
)

FLAGS: tuple[Flag, ...] = (
    Flag(
        "early_stopping",
        lambda params: params.early_stopping,
        "beam search: end as soon as width hypotheses are complete",
        "sampling.beam.early_stopping",
    ),
    Flag(
        "ignore_eos",
        lambda params: params.ignore_eos,
        "continue after the model's end-of-sequence ids",
        "stop.ignore_eos",
    ),
)

LISTS: tuple[Ids | Biases, ...] = (
    Biases(
        "logit_bias",
        lambda params: params.logit_bias,
        "added to the logit, by token id",
        lambda limits: limits.max_logit_biases,
    ),
    Ids(
        "allowed_token_ids",
        lambda params: params.allowed_token_ids,
        "the only ids that may be sampled",
        lambda limits: limits.max_allowed_token_ids,
    ),
    Ids(
        "bad_token_ids",
        lambda params: params.bad_token_ids,
        "ids that may not be sampled",
        lambda limits: limits.max_bad_token_ids,
    ),
    Ids(
        "stop_token_ids",
        lambda params: params.stop_token_ids,
        "ids that end the output",
        lambda limits: limits.max_stop_token_ids,
        "stop.token_ids",
        is_set=False,
    ),
    Ids(
        "logprob_token_ids",
        lambda params: params.logprob_token_ids,
        "ids to report the log probability of at each token, likely or not; needs logprobs",
        lambda limits: limits.max_logprob_token_ids,
        "output.logprob_token_ids",
    ),
)

NUMBERS = (*CHOICE, *REPORTS, *OUTPUTS)
PARAMETERS: tuple[Parameter, ...] = (*NUMBERS, *FLAGS, *LISTS)
# What a sampling strategy takes the place of.
REPLACED = tuple(row for row in CHOICE if row.name in {"temperature", "top_k", "top_p", "min_p", "typical_p"})
FROM_MODEL = tuple(row for row in NUMBERS if row.from_model)
COLUMNS = tuple(row.column for row in NUMBERS if row.column is not None)
