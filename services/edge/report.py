"""What an answer holds besides its outputs' texts, as its request asked: of the prompt, of tokens, of usage. Pure."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from sluice.v1 import types_pb2

from sluice_server.services.edge.wire import Chat, Common, Completion

Json: TypeAlias = dict[str, Any]  # an object of OpenAI's API reference


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerReport:
    """What an answer holds besides texts.

    Attributes:
        scored: log probabilities.
        echoed: per prompt its text, which precedes each output; None where it came as ids. Empty: no echo.
        prompt_only: the answer is about the prompt, and nothing is generated.
        prompt_logprobs: vLLM's log probabilities of the prompt.
        token_ids: the ids of prompt and outputs.
        tokens_as_ids: tokens of log probabilities are named by their ids.
        include_usage: a stream ends with its usage; `continuous_usage`: and each chunk has it.
        num_prompts: prompts of the request; `num_outputs`: outputs of each.
    """

    scored: bool = False
    echoed: tuple[str | None, ...] = ()
    prompt_only: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_prompts: int = 1
    num_outputs: int = 1

    def name(self, token: types_pb2.Token | types_pb2.Candidate) -> str:
        """Returns a token as log probabilities name it: by its text, or by its id if that was asked for."""
        return f"token_id:{token.id}" if self.tokens_as_ids else text_of(token)

    def echo(self, at: int, prompt: types_pb2.PromptInfo) -> str:
        """Returns the text that precedes the outputs of prompt `at`; "" without echo."""
        if not self.echoed:
            return ""
        text = self.echoed[at]
        return b"".join(token.piece for token in prompt.tokens).decode("utf-8", "replace") if text is None else text

    @property
    def adds_to_text(self) -> bool:
        """Whether a chunk with text may hold something else that changes from one to the next, or is left out."""
        return self.scored or self.token_ids or self.continuous_usage or self.prompt_only

    def of_prompt(self, prompt: types_pb2.PromptInfo) -> Json:
        """Returns the fields about a prompt."""
        found: Json = {}
        if self.token_ids:
            found["prompt_token_ids"] = [token.id for token in prompt.tokens]
        if self.prompt_logprobs:
            found["prompt_logprobs"] = [_ranked(token) for token in prompt.tokens]
        return found

    def of_tokens(self, tokens: Sequence[types_pb2.Token]) -> Json:
        """Returns the fields about an output's tokens."""
        return {"token_ids": [token.id for token in tokens]} if self.token_ids else {}


def chat_report(request: Chat, spec: types_pb2.GenerationSpec) -> AnswerReport:
    """Returns the report of the answer to a chat."""
    return _report(request, [spec], scored=bool(request.logprobs))


def completion_report(request: Completion, specs: Sequence[types_pb2.GenerationSpec]) -> AnswerReport:
    """Returns the report of the answer to a completion."""
    report = _report(request, specs, scored=request.logprobs is not None)
    if not request.echo:
        return report
    texts = tuple(spec.text if spec.HasField("text") else None for spec in specs)
    return dataclasses.replace(report, echoed=texts, prompt_only=request.values()["max_tokens"] == 0)


def _report(request: Common, specs: Sequence[types_pb2.GenerationSpec], *, scored: bool) -> AnswerReport:
    streamed = request.stream_options
    include_usage = bool(streamed and streamed.include_usage)
    return AnswerReport(
        scored=scored,
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(streamed and streamed.continuous_usage_stats),
        num_prompts=len(specs),
        num_outputs=specs[0].sampling.n or 1,
    )


def text_of(token: types_pb2.Token | types_pb2.Candidate) -> str:
    """Returns a token's text; half a code point is U+FFFD."""
    return token.piece.decode("utf-8", "replace")


def echo_offset(text: str, prompt: Iterable[types_pb2.Token]) -> int:
    """Returns where a prompt's tokens begin in its text: before it if the first is a special token without text."""
    return len(text) - sum(len(text_of(token)) for token in prompt)


def _ranked(token: types_pb2.Token) -> Json | None:
    """Returns a prompt token's candidates and itself, by id; None for the first token, which follows nothing."""
    if not token.HasField("logprob"):
        return None
    found: tuple[types_pb2.Token | types_pb2.Candidate, ...] = (token, *token.candidates)
    return {str(one.id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": text_of(one)} for one in found}
