"""Derives the grammar job of a request: optional reasoning, then the constraint or the tool calls.

Pure: takes a request and the sections of its chat template, gives a job for the grammar compiler.
"""

from collections.abc import Callable

from sluice_server.engine.errors import unsupported
from sluice_server.services.messages.work import ChatPrompt, Generate, Sections
from sluice_server.services.sections.reasoning import REASONING
from sluice_server.services.sections.tool_format import NAME, NEWLINE, NUMBER, ArgumentTags, CallGrammar
from sluice_server.services.sections.tools import FORMATS
from sluice_server.services.tokenizer.grammar_frames import Calls, GrammarJob, Reasoning, TagRules, ToolRule

Mark = Callable[[str], str]  # turns a text into a grammar's notation: a literal, or a special token by its id
ANY_OBJECT = "{}"


def job_of(work: Generate, sections: Sections, mark: Mark) -> GrammarJob | None:
    """Returns the grammar job of a request; None for an unconstrained output.

    Raises ServiceError when strict tools are written in a format that cannot be enforced.
    """
    may_call = isinstance(work.prompt, ChatPrompt) and work.constraint is None
    calls = _calls(work.prompt, sections, mark) if may_call and isinstance(work.prompt, ChatPrompt) else None
    if calls is None and work.constraint is None:
        return None
    is_split = work.text.split_sections
    return GrammarJob(work.constraint, calls, _reasoning(sections, mark, is_split=is_split, is_call=calls is not None))


def _calls(prompt: ChatPrompt, sections: Sections, mark: Mark) -> Calls | None:
    if not (prompt.must_call or any(tool.strict for tool in prompt.tools)):
        return None
    known = FORMATS.get(sections.tools)
    if known is None or known.grammar is None:
        raise unsupported(
            "chat.tools.strict", "chat.tools.strict: how this model writes calls cannot be enforced: leave it out"
        )
    written = known.grammar
    allowed = [tool for tool in prompt.tools if not prompt.must_call or tool.name in prompt.must_call]
    is_held = {tool.name: bool(prompt.must_call) or tool.strict for tool in allowed}
    rules = [
        ToolRule(
            begin=_lark(written.begin, mark, tool.name),
            parameters=tool.parameters if is_held[tool.name] else ANY_OBJECT,
            end=_lark(written.end, mark),
        )
        for tool in allowed
    ]
    return Calls(
        tools=tuple(rules),
        opening=tuple([_segment(one, mark) for one in written.opening]),
        first=tuple([_segment(one, mark) for one in written.first]),
        last=_lark(written.last, mark),
        separator=_separator(written),
        tags=None if written.tags is None else _tags(written.tags, mark),
        parallel=prompt.parallel,
        is_required=bool(prompt.must_call),
        openings=tuple([(one, mark(one)) for one in known.openings]),
        answer=_lark(written.answer, mark),
        starts=written.starts,
    )


def _lark(segments: tuple[str, ...], mark: Mark, name: str = "") -> str:
    return " ".join([_segment(one, mark, name) for one in segments])


def _segment(segment: str, mark: Mark, name: str = "") -> str:
    if segment == NEWLINE:
        return "/\\n?/"
    if segment == NUMBER:
        return "/[0-9]{1,3}/"
    return mark(name if segment == NAME else segment)


def _tags(tags: ArgumentTags, mark: Mark) -> TagRules:
    line = "\n" if tags.has_lines else ""
    end = mark(tags.value_end)
    is_token = end.startswith("<[")

    def opened(marks: tuple[str, ...]) -> str:
        return f" {mark(chr(10))} ".join([mark(one) for one in marks]) + (f" {mark(line)}" if line else "")

    return TagRules(
        key=mark(tags.key),
        texts=opened(tags.texts),
        values=opened(tags.values),
        end=end if is_token else mark(f"{line}{tags.value_end}\n"),
        more=mark("\n") if is_token else "",
    )


def _separator(written: CallGrammar) -> str:
    """Returns a rule for the text between two calls: the separator's characters, then white space or nothing."""
    text = written.separator.strip()
    space = "/[ \\n]?/" if written.separator else ""
    return f'"{text}" {space}' if text else space


def _reasoning(sections: Sections, mark: Mark, *, is_split: bool, is_call: bool) -> Reasoning | None:
    """Returns the reasoning that may precede the constrained text; None if there may be none.

    Without `is_split` no new reasoning may start, because it would be part of the text and break the constraint.
    """
    known = REASONING.get(sections.reasoning)
    if known is None or not (sections.is_reasoning or is_split):
        return None
    opening, closing, before = known.enclosing
    answer = "" if is_call or not is_split else _lark(before, mark)
    return Reasoning(sections.is_reasoning, _lark(opening, mark), tuple([mark(one) for one in closing]), answer)
