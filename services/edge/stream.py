"""Converts the events of a request's gRPC streams to OpenAI's chunk objects, in order, as server-sent events.

There is one stream for each prompt. The caller cancels the gRPC calls when its client disconnects.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from sluice.v1 import types_pb2

from sluice_server.services.edge.answers import Dialect, ResponseHead, add_usage, reason, sections, usage
from sluice_server.services.edge.report import AnswerReport, Json, echo_offset
from sluice_server.services.edge.resumed import kind_of
from sluice_server.services.edge.shared import Event

_TEXT = "\0text"  # stands for the text in the chunk of which the bytes around a text are taken
_TEXT_BYTES = msgspec.json.encode(_TEXT)
_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(slots=True)
class Chunks:
    """The state between events.

    Attributes:
        head: the bytes with which all chunks begin, from the first stream that was accepted; b"" before.
        prompts: what is known of each stream's prompt.
        lengths: by choice the length of its text, for log probabilities; num_calls: its tool calls.
        running: usage until now; spent: usage of the streams that have ended.
        around: by stream and output the bytes before and behind the text of a chunk that has nothing else.
    """

    dialect: Dialect
    created: int
    report: AnswerReport
    head: bytes = b""
    prompts: dict[int, types_pb2.PromptInfo] = dataclasses.field(default_factory=dict)
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    num_calls: Counter[int] = dataclasses.field(default_factory=Counter)
    running: types_pb2.Usage = dataclasses.field(default_factory=types_pb2.Usage)
    spent: types_pb2.Usage = dataclasses.field(default_factory=types_pb2.Usage)
    num_ended: int = 0
    around: dict[tuple[int, int], tuple[bytes, bytes]] = dataclasses.field(default_factory=dict)

    def of(self, source: int, events: Sequence[Event]) -> bytes:
        """Returns the chunks of the events of stream `source` that came together, as one piece: one write."""
        made = [self._text_alone(source, event.delta) or b"".join(self._chunks(source, event)) for event in events]
        return made[0] if len(made) == 1 else b"".join(made)

    def _text_alone(self, source: int, delta: types_pb2.Delta) -> bytes:
        """Returns the chunk of a delta that has nothing but text, by far the most frequent, from the bytes around its
        text; b"" for all others."""
        text, place = delta.text, (source, delta.output_index)
        if not text or delta.reasoning or delta.tool_call_parts or delta.tool_calls:
            return b""
        around = self.around.get(place) or self._bytes_around(*place)
        return around[0] + _encode(text) + around[1] if around else b""

    def _bytes_around(self, source: int, output_index: int) -> tuple[bytes, bytes] | tuple[()]:
        """Returns the bytes before and behind the text of an output's chunks, () if they change or it has none yet."""
        index = self._index(source, output_index)
        if index not in self.lengths or self.report.adds_to_text:
            return ()
        before, _, behind = self._chunk([self.dialect.piece(index, _TEXT, {}, None)]).rpartition(_TEXT_BYTES)
        around = self.around[source, output_index] = before, behind
        return around

    def _chunks(self, source: int, event: Event) -> Iterator[bytes]:
        match kind_of(event):
            case "accepted":
                one = event.accepted
                name = self.dialect.prefix + one.generation_id
                self.head = self.head or self._head(ResponseHead(name, self.created, one.model, one.revision))
            case "prompt_info":
                self.prompts[source] = event.prompt_info
                self.running.prompt_tokens += event.prompt_info.prompt_tokens
                self.running.cached_tokens += event.prompt_info.cached_tokens
            case "delta":
                yield from self._delta(source, event.delta)
            case "output_finished":
                yield from self._output_finished(source, event.output_finished)
            case "finished":
                add_usage(self.spent, event.finished.usage)
                self.num_ended += 1
                if self.report.include_usage and self.num_ended == self.report.num_prompts:
                    yield self._chunk([], {}, usage(self.spent, self.report))

    def _delta(self, source: int, delta: types_pb2.Delta) -> Iterator[bytes]:
        index = self._index(source, delta.output_index)
        has_begun = index in self.lengths  # for the client, too
        for chunk in self._opened(source, index):
            has_begun = True
            yield chunk
        if self.report.prompt_only:
            return
        self.running.completion_tokens += delta.consumed
        others = sections(delta)
        self.num_calls[index] += len(delta.tool_calls)
        extra = self.report.of_tokens(delta.tokens)
        logprobs = None
        if self.report.scored:
            logprobs = self.dialect.logprobs(delta.tokens, self.lengths[index], self.report)
        self.lengths[index] += len(delta.text)
        # A first token may have no text yet; load tests, and what shows that a model answers, wait for its chunk.
        if delta.text or others or not has_begun or ((logprobs or extra) and delta.tokens):
            yield self._chunk([{**self.dialect.piece(index, delta.text, others, logprobs), **extra}])

    def _output_finished(self, source: int, ended: types_pb2.OutputFinished) -> Iterator[bytes]:
        index = self._index(source, ended.output_index)
        yield from self._opened(source, index)
        why = reason(ended.finish_reason, called=self.num_calls[index] > 0)
        yield self._chunk([{**self.dialect.piece(index, "", {}, None), "finish_reason": why}])

    def _opened(self, source: int, index: int) -> Iterator[bytes]:
        """Yields the first chunks of a choice, once: its role, and the fields about the prompt."""
        if index in self.lengths:
            return
        prompt = self.prompts.get(source, types_pb2.PromptInfo())
        extra, text = self.report.of_prompt(prompt), self.report.echo(source, prompt)
        self.lengths[index] = len(text)
        if self.dialect.opening is not None:
            yield self._chunk([self.dialect.opening(index)], extra)
        elif text or extra:
            logprobs = None
            if self.report.scored:
                tokens = prompt.tokens if text else ()
                logprobs = self.dialect.logprobs(tokens, echo_offset(text, tokens), self.report)
            yield self._chunk([{**self.dialect.piece(index, text, {}, logprobs), **extra}])

    def _index(self, source: int, output_index: int) -> int:
        return source * self.report.num_outputs + output_index

    def _head(self, head: ResponseHead) -> bytes:
        fields = head.of(self.dialect.chunk_object, [])
        del fields["choices"], fields["usage"]
        return b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":'

    def _chunk(self, choices: list[Json], extra: Json | None = None, spent: Json | None = None) -> bytes:
        assert self.head, "the contract sends accepted first"
        encoded = self.head + msgspec.json.encode(choices)
        if not (self.report.include_usage or extra):
            return encoded + b"}\n\n"
        if spent is None and self.report.continuous_usage:
            spent = usage(self.running, self.report)
        rest = {**({"usage": spent} if self.report.include_usage else {}), **(extra or {})}
        return encoded + b"," + msgspec.json.encode(rest)[1:] + b"\n\n"
