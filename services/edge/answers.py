"""Converts events and responses of sluice.v1 to OpenAI's objects. Pure. There is one `Dialect` per kind of request."""

import dataclasses
from collections.abc import Callable, Sequence

from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.services.edge.report import AnswerReport, Json, echo_offset, text_of

_REASONS = {types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between chat completions and completions.

    Attributes:
        choice: makes a choice of the text before an output, the complete output and its logprobs.
        opening: makes the choice of an output's first chunk from its index; None if there is no such chunk.
        piece: makes a chunk's choice of index, text, other parts of the output (see `sections`) and logprobs.
        logprobs: makes the logprobs object of tokens and the length of the text before them.
        prompt_in_choice: whether the fields about a prompt are in its choices, and not beside them.
    """

    prefix: str
    whole_object: str
    chunk_object: str
    choice: Callable[[str, types_pb2.Output, Json | None], Json]
    opening: Callable[[int], Json] | None
    piece: Callable[[int, str, Json, Json | None], Json]
    logprobs: Callable[[Sequence[types_pb2.Token], int, AnswerReport], Json]
    prompt_in_choice: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields with which every object of one answer begins."""

    id: str
    created: int
    model: str
    fingerprint: str

    def of(self, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
        """Returns an object of `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage,
        }


def whole(
    dialect: Dialect, answers: Sequence[inference_pb2.GenerateResponse], created: int, report: AnswerReport
) -> Json:
    """Returns the answer of a request without streaming: the outputs of all its prompts, in order."""
    first, total = answers[0], types_pb2.Usage()
    choices: list[Json] = []
    beside: Json = {}
    for at, answer in enumerate(answers):
        about_prompt = report.of_prompt(answer.prompt_info)
        beside = beside if dialect.prompt_in_choice else about_prompt
        for output in answer.outputs:
            choice = _choice(dialect, answer.prompt_info, output, at, report)
            choices.append({**choice, "index": len(choices), **(about_prompt if dialect.prompt_in_choice else {})})
        add_usage(total, answer.usage)
    head = ResponseHead(dialect.prefix + first.generation_id, created, first.model, first.revision)
    return {**head.of(dialect.whole_object, choices, usage(total, report)), **beside}


def _choice(
    dialect: Dialect, prompt: types_pb2.PromptInfo, output: types_pb2.Output, at: int, report: AnswerReport
) -> Json:
    """Returns the choice of an output of prompt `at`, without its index."""
    if report.prompt_only:
        output = types_pb2.Output(finish_reason=output.finish_reason)
    text = report.echo(at, prompt)
    tokens = [*prompt.tokens, *output.tokens] if report.echoed else output.tokens
    offset = echo_offset(text, prompt.tokens) if report.echoed else 0
    logprobs = dialect.logprobs(tokens, offset, report) if report.scored else None
    return {
        **dialect.choice(text, output, logprobs),
        **report.of_tokens(output.tokens),
        "finish_reason": reason(output.finish_reason, called=bool(output.tool_calls)),
    }


def add_usage(total: types_pb2.Usage, spent: types_pb2.Usage) -> None:
    """Adds the numbers of OpenAI's usage object to `total`."""
    total.prompt_tokens += spent.prompt_tokens
    total.cached_tokens += spent.cached_tokens
    total.completion_tokens += spent.completion_tokens
    total.reasoning_tokens += spent.reasoning_tokens
    total.image_tokens += spent.image_tokens


def usage(spent: types_pb2.Usage, report: AnswerReport) -> Json:
    """Returns OpenAI's usage object. Without the token sampled where the answer is about the prompt only."""
    completion_tokens = 0 if report.prompt_only else spent.completion_tokens
    images = {"image_tokens": spent.image_tokens} if spent.image_tokens else {}
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": spent.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": spent.cached_tokens, **images},
        "completion_tokens_details": {"reasoning_tokens": spent.reasoning_tokens},
    }


def reason(finish: "types_pb2.FinishReason.ValueType", *, called: bool) -> str:
    """Returns OpenAI's finish reason: length; else tool_calls if there are tool calls; else stop."""
    return _REASONS.get(finish, "tool_calls" if called else "stop")


def sections(part: types_pb2.Delta | types_pb2.Output) -> Json:
    """Returns the parts of a chat answer besides its text: reasoning and tool calls, in a stream as they come."""
    found: Json = {"reasoning_content": part.reasoning} if part.reasoning else {}
    if isinstance(part, types_pb2.Delta):
        calls = [_call_part(one) for one in part.tool_call_parts]
    else:
        calls = [_call(one.id, one.name, one.arguments) for one in part.tool_calls]
    return {**found, "tool_calls": calls} if calls else found


def _call_part(part: types_pb2.ToolCallPart) -> Json:
    if part.name:
        return {"index": part.index, **_call(part.id, part.name, part.arguments)}
    return {"index": part.index, "function": {"arguments": part.arguments}}


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def model(found: control_pb2.Model) -> Json:
    """Returns one entry of /v1/models."""
    return {
        "id": found.id,
        "object": "model",
        "created": found.create_time.seconds,
        "owned_by": "sluice",
        "max_model_len": found.context_length,  # an extension, as in vLLM
    }


def alias(name: str, meant: control_pb2.Model) -> Json:
    """Returns the entry of an alias in /v1/models; `meant` is one of the models that it stands for."""
    return {**model(meant), "id": name, "root": meant.id}


def adapter(name: str, base: control_pb2.Model) -> Json:
    """Returns the entry of an adapter in /v1/models, as vLLM has it."""
    return {**model(base), "id": name, "parent": base.id, "root": name}


def _chat_choice(before: str, output: types_pb2.Output, logprobs: Json | None) -> Json:
    text = output.text or (None if output.tool_calls else "")
    message = {"role": "assistant", "content": text, "refusal": None, **sections(output)}
    return {"message": message, "logprobs": logprobs}


def _completion_choice(before: str, output: types_pb2.Output, logprobs: Json | None) -> Json:
    return {"text": before + output.text, "logprobs": logprobs}


def _chat_opening(index: int) -> Json:
    return _chunk_choice(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})


def _chat_piece(index: int, text: str, others: Json, logprobs: Json | None) -> Json:
    content = {"content": text} if text or logprobs else {}
    return _chunk_choice(index, {"delta": {**content, **others}, "logprobs": logprobs})


def _completion_piece(index: int, text: str, others: Json, logprobs: Json | None) -> Json:
    return _chunk_choice(index, {"text": text, "logprobs": logprobs})


def _chunk_choice(index: int, content: Json) -> Json:
    return {"index": index, **content, "finish_reason": None}


def _chat_logprobs(tokens: Sequence[types_pb2.Token], offset: int, report: AnswerReport) -> Json:
    content = []
    for token in tokens:
        top = [_scored(one, report) for one in token.candidates]
        content.append({**_scored(token, report), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(token: types_pb2.Token | types_pb2.Candidate, report: AnswerReport) -> Json:
    return {"token": report.name(token), "logprob": token.logprob, "bytes": list(token.piece)}


def _completion_logprobs(tokens: Sequence[types_pb2.Token], offset: int, report: AnswerReport) -> Json:
    offsets = []
    for token in tokens:
        offsets.append(max(offset, 0))
        offset += len(text_of(token))
    scored = [token.HasField("logprob") for token in tokens]  # the first token of a prompt follows nothing
    return {
        "tokens": [report.name(token) for token in tokens],
        "token_logprobs": [token.logprob if has else None for token, has in zip(tokens, scored, strict=True)],
        "top_logprobs": [_top(token, report) if has else None for token, has in zip(tokens, scored, strict=True)],
        "text_offset": offsets,
    }


def _top(token: types_pb2.Token, report: AnswerReport) -> Json:
    """Returns the candidates of a token by name: of those with one name, such as halves of code points, the best."""
    return {report.name(one): one.logprob for one in reversed(token.candidates)}


CHAT = Dialect(
    prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    choice=_chat_choice,
    opening=_chat_opening,
    piece=_chat_piece,
    logprobs=_chat_logprobs,
    prompt_in_choice=False,
)
COMPLETION = Dialect(
    prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    choice=_completion_choice,
    opening=None,
    piece=_completion_piece,
    logprobs=_completion_logprobs,
    prompt_in_choice=True,
)
