"""Converts the events of one gRPC stream to OpenAI's chunk objects, in order. Independent of HTTP.

The caller cancels the gRPC call when its client disconnects.
"""

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import assert_never

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.edge.answers import Dialect, Json, ResponseHead, reason, sections, usage


@dataclasses.dataclass(slots=True)
class Chunks:
    """The state between events: the head, and per output the length of its text (for logprobs) and its number of
    tool calls."""

    dialect: Dialect
    created: int
    scored: bool
    include_usage: bool
    head: ResponseHead | None = None
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    num_calls: Counter[int] = dataclasses.field(default_factory=Counter)

    async def of(
        self,
        events: AsyncIterator[inference_pb2.StreamGenerateResponse],
    ) -> AsyncGenerator[Json, None]:
        """Yields the chunks of `events`."""
        async for event in events:
            for chunk in self._chunks(event):
                yield chunk

    def _chunks(self, event: inference_pb2.StreamGenerateResponse) -> Iterator[Json]:
        match event.WhichOneof("event"):
            case "accepted":
                one = event.accepted
                self.head = ResponseHead(self.dialect.prefix + one.generation_id, self.created, one.model, one.revision)
            case "delta":
                yield from self._delta(event.delta)
            case "output_finished":
                index = event.output_finished.output_index
                yield from self._opened(index)
                why = reason(event.output_finished.finish_reason, called=self.num_calls[index] > 0)
                yield self._chunk([{**self.dialect.piece(index, "", {}, None), "finish_reason": why}])
            case "finished":
                if self.include_usage:
                    yield self._chunk([], usage(event.finished.usage))
            case "prompt_info" | None:
                return
            case unknown:
                assert_never(unknown)

    def _delta(self, delta: types_pb2.Delta) -> Iterator[Json]:
        index = delta.output_index
        yield from self._opened(index)
        logprobs = self.dialect.logprobs(delta.tokens, self.lengths[index]) if self.scored else None
        self.lengths[index] += len(delta.text)
        others = sections(delta, self.num_calls[index])
        self.num_calls[index] += len(delta.tool_calls)
        if delta.text or others or (self.scored and delta.tokens):
            yield self._chunk([self.dialect.piece(index, delta.text, others, logprobs)])

    def _opened(self, index: int) -> Iterator[Json]:
        if index in self.lengths:
            return
        self.lengths[index] = 0
        if self.dialect.opening is not None:
            yield self._chunk([self.dialect.opening(index)])

    def _chunk(self, choices: list[Json], spent: Json | None = None) -> Json:
        assert self.head is not None, "the contract sends accepted first"
        made = self.head.of(self.dialect.chunk_object, choices, spent)
        if not self.include_usage:
            del made["usage"]
        return made
