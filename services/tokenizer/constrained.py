"""Derives the grammar job of a request: optional reasoning, then the constraint or the required tool calls.

Pure: takes a request and the sections of its chat template, gives a job for the grammar compiler.
"""

from collections.abc import Callable

from sluice_server.engine.errors import unsupported
from sluice_server.services.messages.work import ChatPrompt, Generate, Sections
from sluice_server.services.tokenizer.grammar_frames import Calls, GrammarJob, Reasoning
from sluice_server.services.tokenizer.tool_formats import FORMATS, REASONING

Mark = Callable[[str], str]  # turns a mark into a grammar's notation: a literal, or a special token by its id


def job_of(work: Generate, sections: Sections, mark: Mark) -> GrammarJob | None:
    """Returns the grammar job of a request; None for an unconstrained output.

    Raises ServiceError when calls are required in a format that is not known.
    """
    calls = _calls(work.prompt, sections, mark) if isinstance(work.prompt, ChatPrompt) else None
    if calls is None and work.constraint is None:
        return None
    return GrammarJob(work.constraint, calls, _reasoning(sections, mark, is_split=work.text.split_sections))


def _calls(prompt: ChatPrompt, sections: Sections, mark: Mark) -> Calls | None:
    if not prompt.must_call:
        return None
    known = FORMATS.get(sections.tools)
    if known is None:
        raise unsupported(
            "chat.tool_choice", "chat.tool_choice: how this model writes calls is not known; send the mode AUTO or NONE"
        )
    is_bare = bool(known.bare)
    return Calls(
        tools=tuple((tool.name, tool.parameters) for tool in prompt.tools if tool.name in prompt.must_call),
        key=known.writes,
        opening="" if is_bare else mark(known.opening),
        closing="" if is_bare or not known.closing else mark(known.closing),
        separator=known.separators[:1],
    )


def _reasoning(sections: Sections, mark: Mark, *, is_split: bool) -> Reasoning | None:
    """Returns the reasoning that may precede the constrained text; None if there may be none.

    Without `is_split` no new reasoning may start, because it would be part of the text and break the constraint.
    """
    if not (sections.is_reasoning or (sections.has_reasoning and is_split)):
        return None
    opening, closing = REASONING
    return Reasoning(sections.is_reasoning, mark(opening), mark(closing))
