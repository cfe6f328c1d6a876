"""Processes the tokens of one output: text, sections and finish reason. Pure: no message, no clock.

Combines decoding and stop strings (`stream`) with reasoning and tool calls (`sections`). Stop strings match anywhere in
the model's text, in every section.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sluice_server.engine.request import FinishReason
from sluice_server.services.detokenizer.sections import NOTHING, SectionSplitter
from sluice_server.services.detokenizer.stream import OutputText
from sluice_server.services.messages.work import Sections, Stops, TextOptions, ToolCall
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.tool_formats import FORMATS

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


class Output:
    """The state of one output; push tokens until `finish` is set."""

    def __init__(self, encoder: TextEncoder, name: str, stops: Stops, options: TextOptions) -> None:
        """`name` is unique for the output: the ids of its calls are derived from it, so that a replay repeats them."""
        self._name = name
        self._num_calls = 0
        marks = _marks(encoder, options.sections)
        self._text = OutputText(
            encoder,
            stops.strings,
            include_stop=stops.include,
            skip_special_tokens=options.skip_special_tokens,
            shown=marks,
        )
        self._splitter: SectionSplitter | None = None
        if options.sections is not None:
            shows = not (marks and options.skip_special_tokens)
            self._splitter = SectionSplitter(options.sections, shows_opening=shows)

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

    def _split_one(self, splitter: SectionSplitter, text: str) -> OutputProgress:
        """Splits the text of one token that is not the last."""
        was_reasoning = splitter.is_reasoning
        split = splitter.feed(text)
        num_reasoning = 1 if was_reasoning or splitter.is_reasoning else 0
        calls = tuple([self._named(*call) for call in split.calls])
        return OutputProgress(split.text, 1, None, "", split.reasoning, num_reasoning, calls)

    def _split(self, splitter: SectionSplitter, steps: Iterable[OutputProgress]) -> OutputProgress:
        """Splits the text of several tokens, or of the last ones."""
        advance = OutputProgress("", 0)
        for step in steps:
            part = self._split_one(splitter, step.text)
            rest = splitter.flush() if step.finish is not None else NOTHING
            advance = OutputProgress(
                advance.text + part.text + rest.text,
                advance.num_consumed + step.num_consumed,
                step.finish,
                step.stop_match,
                advance.reasoning + part.reasoning + rest.reasoning,
                advance.num_reasoning + part.num_reasoning * step.num_consumed,
                advance.tool_calls + part.tool_calls,
            )
        return advance

    def _named(self, name: str, arguments: str) -> ToolCall:
        digest = hashlib.sha256(f"{self._name}/{self._num_calls}".encode()).hexdigest()
        self._num_calls += 1
        return ToolCall(name, arguments, digest[:ID_LENGTH])


def _marks(encoder: TextEncoder, sections: Sections | None) -> frozenset[int]:
    """Returns the special tokens that open calls; they must stay in the text to be found."""
    known = FORMATS.get(sections.tools) if sections is not None else None
    token = encoder.tokenizer.token_to_id(known.opening) if known is not None else None
    return frozenset([token]) & encoder.pieces.special_ids if token is not None else frozenset()
