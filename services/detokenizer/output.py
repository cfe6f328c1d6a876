"""Processes the tokens of one output: text, sections and finish reason. Pure: no message, no clock.

Combines decoding and stop strings (`stream`) with reasoning and tool calls (`sections`). Stop strings match anywhere in
the model's text, in every section.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sluice_server.engine.request import FinishReason
from sluice_server.services.detokenizer.stream import OutputText
from sluice_server.services.messages.work import Stops, TextOptions, ToolCall, ToolCallPart
from sluice_server.services.sections.split import NOTHING, SplitCall, SplitPart, Splitter
from sluice_server.services.sections.splitters import marks_of, splitter_of
from sluice_server.services.tokenizer.encoding import TextEncoder

FIRST_SIGN = 0xFDD0  # of 32 code points that Unicode assigns to no character, for use within a program
ID_LENGTH = 9  # of a call's id; some templates reject another length


class OutputProgress(msgspec.Struct, frozen=True, gc=False):
    """The result of pushing tokens. `num_consumed` counts the tokens used: all, unless a stop string ended it."""

    text: str
    num_consumed: int
    finish: FinishReason | None = None
    stop_match: str = ""
    reasoning: str = ""
    num_reasoning: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_parts: tuple[ToolCallPart, ...] = ()


class Output:
    """The state of one output; push tokens until `finish` is set."""

    def __init__(self, encoder: TextEncoder, name: str, stops: Stops, options: TextOptions) -> None:
        """`name` is unique for the output: the ids of its calls are derived from it, so that a replay repeats them."""
        self._name = name
        marks = _marks(encoder, options)
        self._text = OutputText(
            encoder,
            stops.strings,
            include_stop=stops.include,
            skip_special_tokens=options.skip_special_tokens,
            marks={token: sign for token, (_, sign) in marks.items()},
        )
        self._sends_parts = options.call_parts
        self._splitter: Splitter | None = None
        if options.sections is not None:
            self._splitter = splitter_of(options.sections, dict(marks.values()))
        self.may_end = bool(any(stops.strings) or self._splitter is not None)  # by its text

    def push(self, ids: Sequence[int], finish: FinishReason | None) -> OutputProgress:
        """Processes the next tokens; `finish` is the engine's reason if the output ends with them."""
        if len(ids) == 1 and finish is None:  # by far the most frequent case, without loops
            text = self._text.push_one(ids[0])
            if self._text.stopped is None:
                return OutputProgress(text, 1) if self._splitter is None else self._split_one(self._splitter, text)
            step = OutputProgress(text, 1, FinishReason.STOP_STRING, self._text.stopped)
            return step if self._splitter is None else self._split(self._splitter, [step])
        if self._splitter is None:
            return self._advance(ids, finish)
        return self._split(self._splitter, self._steps(ids, finish))

    def _steps(self, ids: Sequence[int], finish: FinishReason | None) -> Iterator[OutputProgress]:
        """Processes token by token, so that reasoning tokens can be counted."""
        for at in range(max(1, len(ids))):
            step = self._advance(ids[at : at + 1], finish if at >= len(ids) - 1 else None)
            yield step
            if step.finish is not None:
                return

    def _advance(self, ids: Sequence[int], finish: FinishReason | None) -> OutputProgress:
        text, num_consumed = self._text.push(ids)
        if finish is not None and self._text.stopped is None:
            text += self._text.finish()  # text that was held back can complete a stop string
        if self._text.stopped is not None:
            return OutputProgress(text, num_consumed, FinishReason.STOP_STRING, self._text.stopped)
        return OutputProgress(text, num_consumed, finish)

    def _split_one(self, splitter: Splitter, text: str) -> OutputProgress:
        """Splits the text of one token that is not the last."""
        was_reasoning = splitter.is_reasoning
        split = splitter.feed(text)
        num_reasoning = 1 if was_reasoning or splitter.is_reasoning else 0
        calls = tuple([self._named(call) for call in split.calls])
        finish = FinishReason.TOOL_CALL if splitter.has_ended else None
        parts = tuple([self._piece(part) for part in split.parts]) if self._sends_parts else ()
        return OutputProgress(split.text, 1, finish, "", split.reasoning, num_reasoning, calls, parts)

    def _split(self, splitter: Splitter, steps: Iterable[OutputProgress]) -> OutputProgress:
        """Splits the text of several tokens, or of the last ones."""
        advance = OutputProgress("", 0)
        for step in steps:
            part = self._split_one(splitter, step.text)
            finish = part.finish or step.finish
            rest = splitter.flush() if finish is not None else NOTHING
            advance = OutputProgress(
                advance.text + part.text + rest.text,
                advance.num_consumed + step.num_consumed,
                finish,
                step.stop_match if finish is FinishReason.STOP_STRING else "",
                advance.reasoning + part.reasoning + rest.reasoning,
                advance.num_reasoning + part.num_reasoning * step.num_consumed,
                advance.tool_calls + part.tool_calls,
                advance.tool_call_parts + part.tool_call_parts,
            )
            if finish is not None:
                break
        return advance

    def _named(self, call: SplitCall) -> ToolCall:
        return ToolCall(call.name, call.arguments, self._id(call.number))

    def _piece(self, part: SplitPart) -> ToolCallPart:
        if not part.name:
            return ToolCallPart(part.number, part.arguments)
        return ToolCallPart(part.number, part.arguments, self._id(part.number), part.name)

    def _id(self, number: int) -> str:
        return hashlib.sha256(f"{self._name}/{number}".encode()).hexdigest()[:ID_LENGTH]


def _marks(encoder: TextEncoder, options: TextOptions) -> dict[int, tuple[str, str]]:
    """Returns the special tokens that the splitter must see although they are left out of the text: their texts, and
    signs that stand for them. No text can spell a sign, and each is one character."""
    if options.sections is None or not options.skip_special_tokens:
        return {}
    found = {mark: encoder.tokenizer.token_to_id(mark) for mark in marks_of(options.sections)}
    special = [(mark, token) for mark, token in found.items() if token in encoder.pieces.special_ids]
    return {token: (mark, chr(FIRST_SIGN + at)) for at, (mark, token) in enumerate(special)}
