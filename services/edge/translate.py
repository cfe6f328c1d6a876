"""Converts OpenAI's requests to specs of sluice.v1. Checks what a spec cannot express; the gateway checks the rest."""

from sluice.v1 import types_pb2

from sluice_server.services.edge.conversation import messages_of, tool_choice_of, tools_of
from sluice_server.services.edge.errors import bad_request
from sluice_server.services.edge.fields import CHAT, COMPLETION, names_of, spec_of
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.wire import Chat, Common, Completion, rows_of
from sluice_server.services.edge.wire_parts import ChosenTool, encode

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
MAX_PROMPTS = 128
_CHAT_ROWS, _COMPLETION_ROWS = ({row.name: row for row in rows_of(route)} for route in (CHAT, COMPLETION))


def chat_spec(request: Chat) -> types_pb2.GenerationSpec:
    """Returns the spec of a chat request. Raises EdgeError."""
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "needs logprobs to be true")
    spec = spec_of(_CHAT_ROWS, request.values())
    _finish(spec, request, (request.top_logprobs or 0) if request.logprobs else None)
    spec.chat.messages.extend(messages_of(request.messages))
    spec.chat.tools.extend(tools_of(request.tools or []))
    if request.tool_choice is not None:
        spec.chat.tool_choice.CopyFrom(tool_choice_of(request.tool_choice))
    if request.tools and not _may_call_again(request):
        spec.chat.parallel_tool_calls = False
    if request.stream and request.tools:
        spec.output.tool_call_parts = True
    variables = _variables(request)
    if variables is not None:
        spec.chat.template_variables = encode("chat_template_kwargs", variables)
    return spec


def completion_specs(request: Completion) -> list[types_pb2.GenerationSpec]:
    """Returns a spec for each prompt. Raises EdgeError."""
    values = request.values()
    common = spec_of(_COMPLETION_ROWS, values)
    if not common.sampling.HasField("max_tokens") and values["n_predict"] is None:
        common.sampling.max_tokens = COMPLETION_MAX_TOKENS
    _finish(common, request, request.logprobs)
    if request.echo:
        common.output.echo = True
        common.sampling.max_tokens = max(1, common.sampling.max_tokens)  # 0: the answer is about the prompt only
        if request.logprobs is not None:
            common.output.prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
    made = []
    for prompt in _prompts(request):
        spec = types_pb2.GenerationSpec()
        spec.CopyFrom(common)
        if isinstance(prompt, str):
            spec.text = prompt
        else:
            spec.token_ids.ids.extend(_ids(prompt))
            spec.ClearField("add_special_tokens")  # ids are used as they are
        made.append(spec)
    return made


def chat_names(request: Chat) -> FieldNames:
    """Returns the names of a chat request's fields in errors."""
    return names_of(_CHAT_ROWS.values(), request.values)


def completion_names(request: Completion, num: int) -> list[FieldNames]:
    """Returns the names of a completion request's fields in errors, for each of its prompts."""
    found = names_of(_COMPLETION_ROWS.values(), request.values)
    return [found] if num == 1 else [found.of_item("prompt", at) for at in range(num)]


def _finish(spec: types_pb2.GenerationSpec, request: Common, logprobs: int | None) -> None:
    """Sets what follows from more than one field of the request."""
    _set_beam(spec.sampling, request)
    if not spec.stop.strings:
        spec.stop.ClearField("include")  # there is nothing to include
    for name, asked in (("logprobs", logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if asked is not None and not 0 <= asked < 1 << 32:
            raise bad_request(name, f"{asked} is not in [0, {(1 << 32) - 1}]")
    output, streamed = spec.output, request.stream_options if request.stream else None
    if logprobs is not None:
        output.logprobs = logprobs
    if request.prompt_logprobs is not None:
        if request.stream:
            raise bad_request("prompt_logprobs", "is not for streams: set stream to false")
        output.prompt_logprobs = request.prompt_logprobs
    output.token_records = logprobs is not None or bool(request.return_token_ids) or bool(request.stream)
    if request.return_token_ids or (streamed and streamed.include_usage and streamed.continuous_usage_stats):
        output.echo = True


def _set_beam(sampling: types_pb2.SamplingParams, request: Common) -> None:
    """Sets the beam search that vLLM's fields ask for: of width best_of or n, where sampling has neither."""
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1.0):
            raise bad_request("length_penalty", "is for a beam search: set use_beam_search to true")
        if request.early_stopping:
            raise bad_request("early_stopping", "is for a beam search: set use_beam_search to true")
        return
    width = sampling.best_of or sampling.n
    if width < 2:
        raise bad_request(
            "use_beam_search", f"needs n or best_of to be 2 or more, the hypotheses that it keeps: {width}"
        )
    sampling.ClearField("best_of")
    sampling.beam.width = width
    if request.length_penalty is not None:
        sampling.beam.length_penalty = request.length_penalty
    if request.early_stopping is not None:
        sampling.beam.early_stopping = request.early_stopping


def _may_call_again(request: Chat) -> bool:
    """Whether an output may have several calls. A tool that is named is called once unless the request says otherwise:
    so do OpenAI and vLLM, and clients that name a tool read one call."""
    if request.parallel_tool_calls is None:
        return not isinstance(request.tool_choice, ChosenTool)
    return request.parallel_tool_calls


def _variables(request: Chat) -> dict[str, object] | None:
    """Returns the variables of the chat template, with the effort of reasoning; None: none are set."""
    given, effort = request.chat_template_kwargs, request.reasoning_effort
    if effort is None:
        return given
    if (given or {}).get("reasoning_effort", effort) != effort:
        raise bad_request("reasoning_effort", "says something else than chat_template_kwargs: send one of them")
    return {**(given or {}), "reasoning_effort": effort}


def _prompts(request: Completion) -> list[str | list[int]]:
    """Returns the prompts: a text, token ids, or a list of either. Raises EdgeError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(one, int) for one in prompt):
        return [[one for one in prompt if isinstance(one, int)]]
    found = [one for one in prompt if not isinstance(one, int)]
    if len(found) != len(prompt) or not 1 <= len(prompt) <= MAX_PROMPTS:
        raise bad_request("prompt", f"is a text, token ids, or a list of 1 to {MAX_PROMPTS} of one of them")
    return found


def _ids(prompt: list[int]) -> list[int]:
    if any(not 0 <= one < 1 << 32 for one in prompt):
        raise bad_request("prompt", "holds a number that is no token id")
    return prompt
