"""The table of how models mark their reasoning, and the choice for a chat template. Pure."""

import dataclasses

from sluice_server.services.sections.formats.gpt_oss import CHANNEL, END, MARKS, MESSAGE, START
from sluice_server.services.sections.tools import AUTO, NONE

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One form of reasoning, at the start of an output.

    Attributes:
        key: the format's name within the server.
        names: its names as an option, as vLLM has them.
        signs: a template that contains one of them uses this form.
        openings, closings: the marks; any of them. The first ones are written where an output is constrained.
        is_always_open: chosen by name, the output begins inside reasoning.
        others: further special tokens that the splitter needs to see.
        enclosing: segments of a grammar: before the reasoning, behind it, and before a constrained answer.
    """

    key: str
    names: tuple[str, ...]
    signs: tuple[str, ...]
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    is_always_open: bool = False
    others: tuple[str, ...] = ()
    enclosing: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())


def _marked(
    key: str,
    names: tuple[str, ...],
    openings: tuple[str, ...],
    closings: tuple[str, ...],
    *,
    is_always_open: bool = False,
) -> ReasoningFormat:
    enclosing = ((openings[0],), (closings[0],), ())
    return ReasoningFormat(key, names, closings[:1], openings, closings, is_always_open, enclosing=enclosing)


_ROWS = (
    ReasoningFormat(
        key="openai_gptoss",
        names=("openai_gptoss",),
        signs=(CHANNEL,),
        openings=(_ANALYSIS,),
        closings=(END,),
        others=MARKS,
        enclosing=((CHANNEL, "analysis", MESSAGE), (END, START, "assistant"), (CHANNEL, "final", MESSAGE)),
    ),
    _marked("mistral", ("mistral",), ("[THINK]",), ("[/THINK]",)),
    _marked("think", ("qwen3", "olmo3", "glm45", "kimi_k2", "minimax_m2", "deepseek_v3"), ("<think>",), ("</think>",)),
    _marked("deepseek_r1", ("deepseek_r1",), ("<think>",), ("</think>",), is_always_open=True),
    _marked("seed_oss", ("seed_oss",), ("<seed:think>",), ("</seed:think>",)),
    _marked(
        "granite",
        ("granite",),
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
)
REASONING = {row.key: row for row in _ROWS}
NAMES = (AUTO, NONE, *(name for row in _ROWS for name in row.names))


def reasoning_format(template: str, choice: str = AUTO) -> ReasoningFormat | None:
    """Returns the form of reasoning that a template's source uses, or the chosen one; None if there is none."""
    if choice == NONE:
        return None
    if choice != AUTO:
        return next(row for row in _ROWS if choice in row.names)
    return next((row for row in _ROWS if any(sign in template for sign in row.signs)), None)


def is_open(row: ReasoningFormat, prompt: str, *, is_chosen: bool) -> bool:
    """Returns True if the output of a rendered prompt begins inside reasoning. `is_chosen`: by name."""
    end = prompt.rstrip()
    if end.endswith(row.openings):
        return True
    return row.is_always_open and is_chosen and not end.endswith(row.closings)


def is_left_open(row: ReasoningFormat, content: str) -> bool:
    """Returns True if an output that continues `content` begins inside reasoning."""
    last_opening, last_closing = (max(content.rfind(mark) for mark in marks) for marks in (row.openings, row.closings))
    return last_opening > last_closing
