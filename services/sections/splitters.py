"""Chooses the splitter of an output, and the marks that it needs to see. Pure."""

from collections.abc import Mapping

from sluice_server.services.messages.work import Sections
from sluice_server.services.sections.harmony import HarmonySplitter
from sluice_server.services.sections.reasoning import REASONING
from sluice_server.services.sections.split import Splitter
from sluice_server.services.sections.splitter import SectionSplitter
from sluice_server.services.sections.tools import FORMATS

# By the key of a format of tool calls or of reasoning; all others are text with marks.
_SPLITTERS = {"openai": HarmonySplitter, "openai_gptoss": HarmonySplitter}


def splitter_of(sections: Sections, marks: Mapping[str, str]) -> Splitter:
    """Returns a splitter for an output. `marks`: by which texts special tokens appear that are left out of the text."""
    made = _SPLITTERS.get(sections.reasoning) or _SPLITTERS.get(sections.tools) or SectionSplitter
    return made(sections, marks)


def marks_of(sections: Sections) -> tuple[str, ...]:
    """Returns the texts of the marks that the splitter of an output looks for."""
    tools, reasoning = FORMATS.get(sections.tools), REASONING.get(sections.reasoning)
    found: tuple[str, ...] = ()
    if tools is not None:
        found += (*tools.openings, *tools.closings, *tools.others)
    if reasoning is not None:
        found += (*reasoning.openings, *reasoning.closings, *reasoning.others)
    return tuple(dict.fromkeys(found))


def section_marks() -> frozenset[str]:
    """Returns the texts around reasoning and tool calls of all formats, which models write themselves."""
    of_tools = [mark for row in FORMATS.values() for mark in (*row.openings, *row.closings)]
    of_reasoning = [mark for row in REASONING.values() for mark in (*row.openings, *row.closings)]
    return frozenset([*of_tools, *of_reasoning])
