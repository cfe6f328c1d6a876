"""A conversation typed on a terminal: its turns and its `/` commands. Pure: lines in, text or the next messages out."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping

from sluice_server.engine.parameters import CHOICE

Turn = tuple[str, str]  # role, text
PARAMETERS: Mapping[str, type[int] | type[float]] = {row.name: row.type for row in CHOICE}
HELP = f"""/help             this list
/clear            forget the conversation
/system TEXT      begin with these instructions; without TEXT: none
/set NAME VALUE   how answers are generated; without VALUE: the model's own
/retry            answer the last question again
/undo             forget the last question and its answer
/stats            show or hide time to first token, tokens a second and tokens used
/quit             leave; Ctrl-D does, too

{textwrap.fill("Parameters: " + ", ".join(PARAMETERS))}

Ctrl-C ends an answer and keeps what there is of it."""


@dataclasses.dataclass(slots=True)
class Dialogue:
    """The conversation so far, and the settings for the next answer.

    Attributes:
        turns: user and assistant messages, without the system message.
        parameters: sampling parameters given with /set.
        has_ended: /quit was typed.
    """

    system: str = ""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    parameters: dict[str, int | float] = dataclasses.field(default_factory=dict)
    shows_stats: bool = True
    has_ended: bool = False

    def typed(self, line: str) -> str | None:
        """Handle a line of the user. Returns the text to show, or None if the model is to answer now."""
        line = line.strip()
        if not line:
            return ""
        if not line.startswith("/"):
            self.turns.append(("user", line))
            return None
        name, _, rest = line[1:].partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            return f"/{name} is no command; /help lists them"
        return command(self, rest.strip())

    def messages(self) -> list[Turn]:
        """Returns the messages for the model."""
        return [*([("system", self.system)] if self.system else []), *self.turns]

    def answered(self, text: str) -> None:
        """Add the model's answer, complete or cut short; without a text, remove the question."""
        if text:
            self.turns.append(("assistant", text))
        elif self.turns:
            self.turns.pop()


def _help(dialogue: Dialogue, rest: str) -> str:
    return HELP


def _clear(dialogue: Dialogue, rest: str) -> str:
    dialogue.turns.clear()
    return "forgotten"


def _system(dialogue: Dialogue, rest: str) -> str:
    dialogue.system = rest
    return "set" if rest else "no instructions"


def _set(dialogue: Dialogue, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if name not in PARAMETERS:
        return f"{name!r} is no parameter; there are {', '.join(PARAMETERS)}"
    if not value.strip():
        dialogue.parameters.pop(name, None)
        return f"{name}: the model's own"
    try:
        dialogue.parameters[name] = PARAMETERS[name](value)
    except ValueError:
        return f"{value!r} is no number for {name}"
    return f"{name}: {dialogue.parameters[name]}"


def _retry(dialogue: Dialogue, rest: str) -> str | None:
    if dialogue.turns and dialogue.turns[-1][0] == "assistant":
        dialogue.turns.pop()
    return None if dialogue.turns else "nothing was asked yet"


def _undo(dialogue: Dialogue, rest: str) -> str:
    if not dialogue.turns:
        return "nothing was asked yet"
    while dialogue.turns and dialogue.turns.pop()[0] != "user":
        pass
    return "taken back"


def _stats(dialogue: Dialogue, rest: str) -> str:
    dialogue.shows_stats = not dialogue.shows_stats
    return "shown" if dialogue.shows_stats else "hidden"


def _quit(dialogue: Dialogue, rest: str) -> str:
    dialogue.has_ended = True
    return ""


_COMMANDS: Mapping[str, Callable[[Dialogue, str], str | None]] = {
    "help": _help,
    "clear": _clear,
    "system": _system,
    "set": _set,
    "retry": _retry,
    "undo": _undo,
    "stats": _stats,
    "quit": _quit,
}
