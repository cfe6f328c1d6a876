"""Converts events and responses of sluice.v1 to OpenAI's objects. Pure. There is one `Dialect` per kind of request."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sluice.v1 import control_pb2, inference_pb2, types_pb2

Json: TypeAlias = dict[str, Any]  # an object of OpenAI's API reference
_REASONS = {types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between chat completions and completions.

    Attributes:
        choice: makes a choice of a complete output and its logprobs.
        opening: makes the choice of an output's first chunk from its index; None if there is no such chunk.
        piece: makes a chunk's choice of index, text, other parts of the output (see `sections`) and logprobs.
        logprobs: makes the logprobs object of tokens and the length of the text before them.
    """

    prefix: str
    whole_object: str
    chunk_object: str
    choice: Callable[[types_pb2.Output, Json | None], Json]
    opening: Callable[[int], Json] | None
    piece: Callable[[int, str, Json, Json | None], Json]
    logprobs: Callable[[Sequence[types_pb2.Token], int], Json]


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


def whole(dialect: Dialect, answers: Sequence[inference_pb2.GenerateResponse], created: int, scored: bool) -> Json:
    """Returns the answer of a request without streaming: the outputs of all its prompts, in order."""
    first = answers[0]
    outputs = [output for answer in answers for output in answer.outputs]
    choices = []
    for index, output in enumerate(outputs):
        choice = dialect.choice(output, dialect.logprobs(output.tokens, 0) if scored else None)
        choices.append(
            {**choice, "index": index, "finish_reason": reason(output.finish_reason, called=bool(output.tool_calls))}
        )
    total = types_pb2.Usage()
    for answer in answers:
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"):
            setattr(total, name, getattr(total, name) + getattr(answer.usage, name))
    head = ResponseHead(dialect.prefix + first.generation_id, created, first.model, first.revision)
    return head.of(dialect.whole_object, choices, usage(total))


def usage(spent: types_pb2.Usage) -> Json:
    """Returns OpenAI's usage object."""
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "total_tokens": spent.prompt_tokens + spent.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": spent.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": spent.reasoning_tokens},
    }


def reason(finish: "types_pb2.FinishReason.ValueType", *, called: bool) -> str:
    """Returns OpenAI's finish reason: length; else tool_calls if there are tool calls; else stop."""
    return _REASONS.get(finish, "tool_calls" if called else "stop")


def sections(part: types_pb2.Delta | types_pb2.Output, num_calls: int | None) -> Json:
    """Returns the parts of a chat answer besides its text: reasoning and tool calls. In a stream tool calls have an
    index; `num_calls` came before. None: not a stream."""
    found: Json = {"reasoning_content": part.reasoning} if part.reasoning else {}
    if part.tool_calls:
        found["tool_calls"] = [
            {
                **({} if num_calls is None else {"index": num_calls + at}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for at, call in enumerate(part.tool_calls)
        ]
    return found


def model(found: control_pb2.Model) -> Json:
    """Returns one entry of /v1/models."""
    return {"id": found.id, "object": "model", "created": 0, "owned_by": "sluice"}


def _chat_choice(output: types_pb2.Output, logprobs: Json | None) -> Json:
    text = output.text or (None if output.tool_calls else "")
    message = {"role": "assistant", "content": text, "refusal": None, **sections(output, None)}
    return {"message": message, "logprobs": logprobs}


def _completion_choice(output: types_pb2.Output, logprobs: Json | None) -> Json:
    return {"text": output.text, "logprobs": logprobs}


def _chat_opening(index: int) -> Json:
    return _chunk_choice(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})


def _chat_piece(index: int, text: str, others: Json, logprobs: Json | None) -> Json:
    content = {"content": text} if text or logprobs else {}
    return _chunk_choice(index, {"delta": {**content, **others}, "logprobs": logprobs})


def _completion_piece(index: int, text: str, others: Json, logprobs: Json | None) -> Json:
    return _chunk_choice(index, {"text": text, "logprobs": logprobs})


def _chunk_choice(index: int, content: Json) -> Json:
    return {"index": index, **content, "finish_reason": None}


def _chat_logprobs(tokens: Sequence[types_pb2.Token], offset: int) -> Json:
    content = []
    for token in tokens:
        top = [_scored(one.piece, one.logprob) for one in token.candidates]
        content.append({**_scored(token.piece, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def _completion_logprobs(tokens: Sequence[types_pb2.Token], offset: int) -> Json:
    texts = [_text(token.piece) for token in tokens]
    offsets = [offset + sum(map(len, texts[:at])) for at in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_text(one.piece): one.logprob for one in token.candidates} for token in tokens],
        "text_offset": offsets,
    }


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


CHAT = Dialect(
    prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    choice=_chat_choice,
    opening=_chat_opening,
    piece=_chat_piece,
    logprobs=_chat_logprobs,
)
COMPLETION = Dialect(
    prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    choice=_completion_choice,
    opening=None,
    piece=_completion_piece,
    logprobs=_completion_logprobs,
)
