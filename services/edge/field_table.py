"""The table of the fields that /v1/chat/completions and /v1/completions take, and of those that they refuse by name.

One row a field: OpenAI's (`openai_fields`), and what vLLM, SGLang and llama.cpp add. `wire` makes the requests of it,
`fields` the specs and the names in errors, `tools.reference_fields` the page of the documentation.
"""

from typing import Any

from sluice_server.services.edge import constraints
from sluice_server.services.edge.fields import (
    CHATS,
    COMPLETIONS,
    LLAMA,
    SGLANG,
    SLUICE,
    VLLM,
    Label,
    Own,
    Row,
    Sent,
    Unbuilt,
    unless,
)
from sluice_server.services.edge.openai_fields import OPENAIS
from sluice_server.services.edge.wire_parts import StructuredOutputs, encode

_JSON = dict[str, Any]

SAMPLING: tuple[Row, ...] = (
    Sent(
        name="top_k",
        kind=int,
        origin=VLLM,
        path="sampling.top_k",
        by=lambda top_k: 0 if top_k == -1 else top_k,
        note="-1 is 0: all",
    ),
    Sent(name="min_p", kind=float, origin=VLLM, path="sampling.min_p"),
    Sent(name="typical_p", kind=float, origin=LLAMA, path="sampling.typical_p"),
    Sent(name="repetition_penalty", kind=float, origin=VLLM, path="sampling.repetition_penalty"),
    Sent(name="min_tokens", kind=int, origin=VLLM, path="sampling.min_tokens"),
    Sent(
        name="n_predict",
        kind=int,
        origin=LLAMA,
        path="sampling.max_tokens",
        by=unless(-1),
        note="-1: as many as the context leaves",
    ),
    Sent(name="stop_token_ids", kind=list[int], origin=VLLM, path="stop.token_ids"),
    Sent(name="ignore_eos", kind=bool, origin=VLLM, path="stop.ignore_eos"),
    Sent(name="include_stop_str_in_output", kind=bool, origin=VLLM, path="stop.include", by=unless(False)),
    Sent(name="no_stop_trim", kind=bool, origin=SGLANG, path="stop.include", by=unless(False)),
    Sent(name="allowed_token_ids", kind=list[int], origin=VLLM, path="sampling.allowed_token_ids"),
    Sent(name="bad_token_ids", kind=list[int], origin=SLUICE, path="sampling.bad_token_ids"),
    Sent(name="bad_words", kind=list[str], origin=VLLM, path="sampling.bad_words"),
    Sent(name="logprob_token_ids", kind=list[int], origin=VLLM, path="output.logprob_token_ids"),
    Own(
        name="use_beam_search",
        kind=bool,
        origin=VLLM,
        note="`sampling.beam`, of width `best_of` or `n`",
        names={"sampling.beam": "use_beam_search"},
    ),
    Own(
        name="length_penalty",
        kind=float,
        origin=VLLM,
        note="`sampling.beam.length_penalty`",
        names={"sampling.beam.length_penalty": "length_penalty"},
    ),
    Own(
        name="early_stopping",
        kind=bool,
        origin=VLLM,
        note="`sampling.beam.early_stopping`",
        names={"sampling.beam.early_stopping": "early_stopping"},
    ),
    Unbuilt(
        name="repeat_penalty",
        kind=float,
        origin=LLAMA,
        neutral=(1.0,),
        instead="use repetition_penalty, which counts the whole prompt and output",
    ),
    *(
        Unbuilt(name=name, kind=float, origin=LLAMA, neutral=(neutral,))
        for name, neutral in (
            ("mirostat", 0),
            ("dynatemp_range", 0),
            ("xtc_probability", 0),
            ("dry_multiplier", 0),
            ("top_n_sigma", -1),
            ("n_probs", 0),
            ("n_keep", 0),
        )
    ),
    Unbuilt(name="samplers", kind=list[str], origin=LLAMA),
    Unbuilt(name="lora", kind=list[Any], origin=LLAMA, neutral=([],)),
    Unbuilt(name="lora_path", kind=Any, origin=SGLANG),
    Unbuilt(name="stop_regex", kind=Any, origin=SGLANG, neutral=("", [])),
    Unbuilt(name="custom_logit_processor", kind=str, origin=SGLANG),
    Unbuilt(name="custom_params", kind=_JSON, origin=SGLANG, neutral=({},)),
    Unbuilt(name="logits_processors", kind=Any, origin=VLLM, neutral=([],)),
    Unbuilt(name="thinking_token_budget", kind=int, origin=VLLM, neutral=(-1,)),
    Unbuilt(name="repetition_detection", kind=_JSON, origin=VLLM),
)

FORMATS: tuple[Row, ...] = (
    Sent(
        name="structured_outputs",
        kind=StructuredOutputs,
        origin=VLLM,
        path="constraint",
        by=constraints.of_structured_outputs,
    ),
    *(
        Sent(name=name, kind=_JSON | str, origin=origin, path="constraint", by=constraints.of_schema(name))
        for name, origin in (("guided_json", VLLM), ("json_schema", SGLANG))
    ),
    *(
        Sent(name=name, kind=str, origin=origin, path="constraint", by=constraints.of_regex)
        for name, origin in (("guided_regex", VLLM), ("regex", SGLANG))
    ),
    *(
        Sent(name=name, kind=str, origin=origin, path="constraint", by=constraints.of_grammar, note="in GBNF")
        for name, origin in (("guided_grammar", VLLM), ("ebnf", SGLANG), ("grammar", LLAMA))
    ),
    Sent(name="guided_choice", kind=list[str], origin=VLLM, path="constraint", by=constraints.of_choice),
    Label(name="guided_decoding_backend", kind=str, origin=VLLM, note="there is one"),
    Unbuilt(name="guided_whitespace_pattern", kind=str, origin=VLLM),
    Unbuilt(name="structural_tag", kind=Any, origin=SGLANG),
)

PROMPTS: tuple[Row, ...] = (
    Sent(
        name="add_generation_prompt",
        kind=bool,
        origin=VLLM,
        routes=CHATS,
        path="chat.add_generation_prompt",
    ),
    Sent(
        name="continue_final_message",
        kind=bool,
        origin=VLLM,
        routes=CHATS,
        path="chat.continue_final_message",
        note="`add_generation_prompt` is then false",
    ),
    Own(
        name="chat_template_kwargs",
        kind=dict,
        origin=VLLM,
        routes=CHATS,
        note="`chat.template_variables`",
        names={"chat.template_variables": "chat_template_kwargs"},
    ),
    Sent(
        name="chat_template",
        kind=str,
        origin=VLLM,
        routes=CHATS,
        path="chat.template",
        by=unless(""),
        note="where the server has `--trust-request-chat-template`",
    ),
    Sent(
        name="documents",
        kind=list[_JSON],
        origin=VLLM,
        routes=CHATS,
        path="chat.documents",
        by=lambda documents: [encode(f"documents[{at}]", one) for at, one in enumerate(documents)],
    ),
    Sent(
        name="add_special_tokens",
        kind=bool,
        origin=VLLM,
        path="add_special_tokens",
        note="true if absent in completions, false in chats",
    ),
    Sent(name="truncate_prompt_tokens", kind=int, origin=VLLM, path="truncate_prompt_tokens"),
    Unbuilt(name="truncation_side", kind=str, origin=VLLM, neutral=("left",), instead="the last tokens are kept"),
    Unbuilt(
        name="prompt_embeds",
        kind=Any,
        origin=VLLM,
        routes=COMPLETIONS,
        instead="gRPC takes plain bytes (GenerationSpec.prompt_embeds); pickled tensors are never read",
    ),
    Unbuilt(name="mm_processor_kwargs", kind=_JSON, origin=VLLM, neutral=({},)),
    Unbuilt(name="media_io_kwargs", kind=_JSON, origin=VLLM, neutral=({},)),
)

OUTPUTS: tuple[Row, ...] = (
    Own(
        name="prompt_logprobs",
        kind=int,
        origin=VLLM,
        note="`output.prompt_logprobs`; not in streams",
        names={"output.prompt_logprobs": "prompt_logprobs"},
    ),
    Own(name="return_token_ids", kind=bool, origin=VLLM, note="ids of the prompt (`output.echo`) and of the answer"),
    Own(name="return_tokens_as_token_ids", kind=bool, origin=VLLM, note="tokens of log probabilities by their ids"),
    Sent(name="skip_special_tokens", kind=bool, origin=VLLM, path="output.skip_special_tokens"),
    Sent(name="stream_interval", kind=int, origin=SGLANG, path="output.stream_interval", note="in streams only"),
    Unbuilt(name="spaces_between_special_tokens", kind=bool, origin=VLLM, neutral=(True,)),
    Unbuilt(name="detokenize", kind=bool, origin=VLLM, neutral=(True,)),
    Unbuilt(name="include_reasoning", kind=bool, origin=VLLM, routes=CHATS, neutral=(True,)),
    Unbuilt(name="separate_reasoning", kind=bool, origin=SGLANG, routes=CHATS, neutral=(True,)),
    Unbuilt(name="stream_reasoning", kind=bool, origin=SGLANG, routes=CHATS, neutral=(True,)),
    Unbuilt(name="reasoning_format", kind=str, origin=LLAMA, routes=CHATS, neutral=("auto", "deepseek")),
    Unbuilt(name="parse_tool_calls", kind=bool, origin=LLAMA, routes=CHATS, neutral=(True,)),
    *(
        Unbuilt(name=name, kind=bool, origin=origin, neutral=(False,))
        for name, origin in (
            ("return_prompt_text", VLLM),
            ("return_token_offsets", VLLM),
            ("return_hidden_states", SGLANG),
            ("return_routed_experts", SGLANG),
            ("return_cached_tokens_details", SGLANG),
            ("timings_per_token", LLAMA),
            ("post_sampling_probs", LLAMA),
            ("return_tokens", LLAMA),
        )
    ),
)

SCHEDULING: tuple[Row, ...] = (
    Sent(
        name="priority",
        kind=int,
        origin=VLLM,
        path="scheduling.priority",
        by=lambda priority: -priority,
        note="negated: as in vLLM a lower number is served first",
    ),
    *(
        Sent(
            name=name,
            kind=str,
            origin=origin,
            path="cache.bypass",
            by=lambda salt: True if salt else None,
            note="the prompt is in no cache that others could measure",
        )
        for name, origin in (("cache_salt", VLLM), ("extra_key", SGLANG))
    ),
    Sent(
        name="cache_prompt",
        kind=bool,
        origin=LLAMA,
        path="cache.bypass",
        by=lambda cached: None if cached else True,
        note="false: neither read nor written",
    ),
    Label(name="request_id", kind=str, origin=VLLM, note="a label; the answer's id is the generation's"),
    Label(name="rid", kind=str, origin=SGLANG, note="the same"),
    Label(name="session_id", kind=str, origin=VLLM, note="a label"),
    Label(name="custom_labels", kind=_JSON, origin=SGLANG, note="labels"),
    Label(name="id_slot", kind=int, origin=LLAMA, note="a hint for the prefix cache"),
    Unbuilt(name="session_params", kind=_JSON, origin=SGLANG, neutral=({},)),
    Unbuilt(name="kv_transfer_params", kind=_JSON, origin=VLLM, neutral=({},)),
    Unbuilt(name="vllm_xargs", kind=_JSON, origin=VLLM, neutral=({},)),
    *(
        Unbuilt(name=name, kind=Any, origin=SGLANG)
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank")
    ),
)

ROWS: tuple[Row, ...] = (*OPENAIS, *SAMPLING, *FORMATS, *PROMPTS, *OUTPUTS, *SCHEDULING)
