"""Converts events of the generation service to responses of `vllm.grpc.engine`. Pure.

A stream has a chunk for each delta, and per output a `complete` without the tokens that its chunks had. Otherwise there
is one `complete` per output, with all its tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.generation.events import (
    AcceptedEvent,
    DeltaEvent,
    OutputFinishedEvent,
    PromptEvent,
    StreamEvent,
)
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm
from sluice_server.services.messages.details import Scored, TokenLogprobs, TokenRecord
from sluice_server.services.messages.messages import Text

REASONS = {FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}  # all others are "stop"


@dataclasses.dataclass(slots=True)
class OutputSoFar:
    """What has come of one output and is not sent yet, and its drafts."""

    tokens: list[TokenRecord] = dataclasses.field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0


class GenerateAnswers:
    """The responses of one generation."""

    def __init__(self, request: vllm.GenerateRequest) -> None:
        asked = request.sampling_params
        self._streams = request.stream
        self._num_top = asked.logprobs if asked.HasField("logprobs") else None
        self._num_prompt = 0
        self._num_cached = 0
        self._scored: vllm.InputLogProbs | None = None  # until it has been sent
        self._outputs: dict[int, OutputSoFar] = {}

    def of(self, event: StreamEvent) -> Iterator[vllm.GenerateResponse]:
        """Yields the responses that one event adds."""
        match event:
            case AcceptedEvent():
                self._num_prompt, self._num_cached = event.num_prompt, event.num_cached
            case PromptEvent(tokens=Scored(tokens=records)):
                self._scored = input_logprobs(records)
            case DeltaEvent():
                self._collect(event.texts)
                if self._streams:
                    yield self._chunk(event.texts[0].output_index)
            case OutputFinishedEvent():
                yield self._complete(event)

    def _collect(self, texts: Sequence[Text]) -> None:
        output = self._outputs.setdefault(texts[0].output_index, OutputSoFar())
        for text in texts:
            output.tokens.extend(text.tokens)
            for num_drafted, num_accepted in text.drafts:
                output.num_drafted += num_drafted
                output.num_accepted += num_accepted

    def _chunk(self, index: int) -> vllm.GenerateResponse:
        tokens = self._take(index)
        return vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=[one.id for one in tokens],
                prompt_tokens=self._num_prompt,
                completion_tokens=len(tokens),
                cached_tokens=self._num_cached,
                output_logprobs=self._logprobs(tokens),
                input_logprobs=self._input_logprobs(),
                index=index,
            )
        )

    def _complete(self, event: OutputFinishedEvent) -> vllm.GenerateResponse:
        last = event.last
        tokens, output = self._take(last.output_index), self._outputs[last.output_index]
        complete = vllm.GenerateComplete(
            output_ids=[one.id for one in tokens],
            finish_reason=REASONS.get(last.finish, "stop") if last.finish is not None else "",
            prompt_tokens=self._num_prompt,
            completion_tokens=event.num_tokens,
            cached_tokens=self._num_cached,
            output_logprobs=self._logprobs(tokens),
            input_logprobs=self._input_logprobs(),
            index=last.output_index,
            spec_accepted_tokens=output.num_accepted,
            spec_draft_tokens=output.num_drafted,
        )
        if last.finish is FinishReason.STOP_STRING:
            complete.matched_stop_str = last.stop_match
        elif last.finish is FinishReason.STOP_TOKEN and last.tokens:
            complete.matched_token_id = last.tokens[-1].id
        return vllm.GenerateResponse(complete=complete)

    def _take(self, index: int) -> list[TokenRecord]:
        output = self._outputs.setdefault(index, OutputSoFar())
        tokens, output.tokens = output.tokens, []
        return tokens

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> vllm.OutputLogProbs | None:
        if self._num_top is None or not tokens:
            return None
        made = vllm.OutputLogProbs(token_ids=[one.id for one in tokens])
        for one in tokens:
            assert one.logprobs is not None, "the request asked for them"
            made.token_logprobs.append(one.logprobs.logprob)
            made.top_logprobs.append(_top(one.logprobs))
        return made

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        """Returns the prompt's log probabilities once, in the first response."""
        scored, self._scored = self._scored, None
        return scored


def input_logprobs(records: Sequence[TokenRecord]) -> vllm.InputLogProbs:
    """Converts the log probabilities of a prompt; its first token has none."""
    made = vllm.InputLogProbs(token_ids=[one.id for one in records])
    for one in records:
        value = None if one.logprobs is None else one.logprobs.logprob
        made.token_logprobs.append(vllm.InputTokenLogProb(value=value))
        made.top_logprobs.append(vllm.TopLogProbs() if one.logprobs is None else _top(one.logprobs))
    return made


def _top(scores: TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=scores.top_logprobs, token_ids=scores.top_ids)
