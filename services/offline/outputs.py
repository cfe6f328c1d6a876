"""Defines the results of a prompt, in the shape of vLLM's, and builds them from the messages of the stages."""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import Scored, Tokenized, TokenRecord
from sluice_server.services.messages.messages import Text
from sluice_server.services.messages.work import Generate, ToolCall, unpack_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log probability of one token at one position, before temperature and truncation.

    Rank 1 is the most likely.
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]  # by id: the sampled token, then the alternatives and the requested ids


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        text: the text, without the reasoning and tool calls of a chat.
        cumulative_logprob: the sum over its tokens; None if no log probabilities were requested.
        logprobs: one entry for each token.
        finish_reason: length, eos, stop_token or stop_string.
        stop_reason: the stop string or the id of the stop token that ended it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str
    stop_reason: str | int | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        prompt: the text; None for a prompt of ids.
        prompt_logprobs: one entry for each token; None for the first, which has no token before it.
        seed: the sampling seed; the same seed gives the same tokens.
        num_cached_tokens: tokens of the prompt that were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


def output_of(request: OpenRequest, prompt: str | None) -> RequestOutput:
    """Builds the result of a generation that has finished."""
    work, report = request.asked.work, request.prompt
    assert isinstance(work, Generate) and report is not None, "the request is a generation and its prompt was reported"
    return RequestOutput(
        request_id=request.envelope.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_ids(report),
        outputs=[_output(request, index) for index in range(len(request.outputs))],
        seed=work.params.seed,
        prompt_logprobs=_prompt_logprobs(report),
        num_cached_tokens=request.accounting.admitted.num_cached if request.accounting.admitted is not None else 0,
    )


def prompt_ids(report: Tokenized | Scored) -> list[int]:
    """Returns the token ids of a prompt's result."""
    return unpack_ids(report.ids) if isinstance(report, Tokenized) else [token.id for token in report.tokens]


def _prompt_logprobs(report: Tokenized | Scored) -> list[Logprobs | None] | None:
    if isinstance(report, Tokenized):
        return None
    return [None, *(_logprobs(token) for token in report.tokens[1:])]


def _output(request: OpenRequest, index: int) -> CompletionOutput:
    texts = request.delivery.take_all(index)
    last = request.outputs[index].last
    assert last is not None and last.finish is not None, "it has ended"
    tokens = [token for one in texts for token in one.tokens]
    has_logprobs = bool(tokens) and all(token.logprobs is not None for token in tokens)
    return CompletionOutput(
        index=index,
        text="".join([one.text for one in texts]),
        token_ids=[token.id for token in tokens],
        cumulative_logprob=_sum(tokens) if has_logprobs else None,
        logprobs=[_logprobs(token) for token in tokens] if has_logprobs else None,
        finish_reason=last.finish.value,
        stop_reason=_stop_reason(last),
        reasoning="".join([one.reasoning for one in texts]),
        tool_calls=tuple([call for one in texts for call in one.tool_calls]),
    )


def _stop_reason(last: Text) -> str | int | None:
    if last.finish is FinishReason.STOP_STRING:
        return last.stop_match
    return last.tokens[-1].id if last.finish is FinishReason.STOP_TOKEN and last.tokens else None


def _sum(tokens: Sequence[TokenRecord]) -> float:
    return sum([token.logprobs.logprob for token in tokens if token.logprobs is not None])


def _logprobs(token: TokenRecord) -> Logprobs:
    scores = token.logprobs
    assert scores is not None, "log probabilities were requested"
    found = {token.id: Logprob(scores.logprob, scores.rank, _shown(token.piece))}
    tops = zip(scores.top_ids, scores.top_logprobs, range(1, len(scores.top_ids) + 1), strict=True)
    asked = zip(scores.asked_ids, scores.asked_logprobs, scores.asked_ranks, strict=True)
    for (rival, logprob, rank), piece in zip([*tops, *asked], token.top_pieces, strict=True):
        found.setdefault(rival, Logprob(logprob, rank, _shown(piece)))
    return found


def _shown(piece: bytes) -> str:
    return piece.decode(errors="replace")
