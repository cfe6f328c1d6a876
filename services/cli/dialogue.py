"""A conversation typed on a terminal: its turns and its `/` commands. Pure: lines in, text or the next messages out."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.engine.parameter_kinds import Number
from sluice_server.engine.parameters import CHOICE
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.config import bad_setting

Said: TypeAlias = str | tuple[bytes | str, ...]  # a text, or files of images and a text
Turn = tuple[str, Said]  # role, what was said
Values = Mapping[str, int | float]
PARAMETERS: Mapping[str, Number] = {row.name: row for row in CHOICE}
UNBOUNDED = Limits(context_length=2**31 - 1, vocab_size=2**31 - 1)
HELP = f"""/help             this list
/clear            forget the conversation
/system TEXT      begin with these instructions; without TEXT: none
/set NAME VALUE   how answers are generated; without VALUE: the default; without NAME: what is in effect
/image FILE       show a picture with the next question
/retry            answer the last question again
/undo             forget the last question and its answer
/stats            show or hide time to first token, tokens a second and tokens used
/exit             leave; /quit and Ctrl-D do, too

\"\"\"               on a line of its own begins and ends a message of several lines; pasted lines need none

{textwrap.fill("Parameters: " + ", ".join(PARAMETERS))}

Ctrl-C ends an answer and keeps what there is of it. At the prompt it discards the line; pressed twice it leaves."""


def _unreadable(path: str) -> bytes:
    raise invalid("image", f"{path} cannot be read here")


@dataclasses.dataclass(slots=True)
class Dialogue:
    """The conversation so far, and the settings for the next answer.

    Attributes:
        turns: user and assistant messages, without the system message.
        defaults: sampling parameters that hold unless given.
        parameters: sampling parameters given as options or with /set.
        limits: of the model.
        unanswered: the last question if it got no answer; "" without one.
        images: files of pictures that belong to the next question.
        read_image: returns the bytes of a file; raises ServiceError.
        has_ended: /exit was typed.
    """

    system: str = ""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    defaults: Values = dataclasses.field(default_factory=dict)
    parameters: dict[str, int | float] = dataclasses.field(default_factory=dict)
    limits: Limits = UNBOUNDED
    unanswered: Said = ""
    images: list[bytes] = dataclasses.field(default_factory=list)
    read_image: Callable[[str], bytes] = _unreadable
    shows_stats: bool = True
    has_ended: bool = False

    def typed(self, line: str) -> str | None:
        """Handle a line of the user. Returns the text to show, or None if the model is to answer now."""
        line = line.strip()
        if not line:
            return ""
        if not line.startswith("/"):
            self.asked(line)
            return None
        name, _, rest = line[1:].partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            return f"/{name} is no command; /help lists them"
        return command(self, rest.strip())

    def asked(self, said: Said) -> None:
        """Add a question, whatever it begins with, behind the pictures that belong to it."""
        if self.images and isinstance(said, str):
            said = (*self.images, said)
            self.images.clear()
        self.turns.append(("user", said))

    def sampling(self) -> dict[str, int | float]:
        """Returns the sampling parameters of the next answer; absent ones are left to the server."""
        return {**self.defaults, **self.parameters}

    def messages(self, num_dropped: int = 0) -> list[Turn]:
        """Returns the messages for the model, without the oldest turns."""
        return [*([("system", self.system)] if self.system else []), *self.turns[num_dropped:]]

    def more_dropped(self, num_dropped: int) -> int:
        """Returns how many of the oldest turns to leave out where leaving out `num_dropped` is not enough: a quarter of
        the rest, whole exchanges. Returns `num_dropped` if the question alone is left."""
        exchanges = [at for at in range(num_dropped + 1, len(self.turns)) if self.turns[at][0] == "user"]
        return exchanges[(len(exchanges) - 1) // 4] if exchanges else num_dropped

    def drop(self, num_dropped: int) -> None:
        """Forget the oldest turns."""
        del self.turns[:num_dropped]

    def answered(self, text: str) -> None:
        """Add the model's answer, complete or cut short; without a text, take the question back until /retry."""
        self.unanswered = ""
        if text:
            self.turns.append(("assistant", text))
        elif self.turns:
            self.unanswered = self.turns.pop()[1]


def check_parameter(name: str, value: float, limits: Limits) -> None:
    """Raise ServiceError for a value that the server would refuse."""
    row = PARAMETERS[name]
    if row.off is not None and value == row.off:
        raise invalid(name, f"{value} is below 1; leave it out for the default", limit=1)
    given: dict[str, Any] = {name: value}
    row.check(dataclasses.replace(SamplingParams(), **given), limits)


def check_option(name: str, value: float, limits: Limits) -> None:
    """Raise ServiceError naming the flag for a value that the server would refuse."""
    try:
        check_parameter(name, value, limits)
    except ServiceError as error:
        raise bad_setting(name, error.message.removeprefix(f"{name}: ")) from error


def _help(dialogue: Dialogue, rest: str) -> str:
    return HELP


def _clear(dialogue: Dialogue, rest: str) -> str:
    dialogue.turns.clear()
    dialogue.images.clear()
    dialogue.unanswered = ""
    return "forgotten"


def _system(dialogue: Dialogue, rest: str) -> str:
    dialogue.system = rest
    return "set" if rest else "no instructions"


def _set(dialogue: Dialogue, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if not name:
        shown = ", ".join(f"{name} {value:g}" for name, value in dialogue.sampling().items())
        return f"{shown or 'nothing is set'}; the model's defaults for the rest"
    if name not in PARAMETERS:
        return f"{name!r} is no parameter; there are {', '.join(PARAMETERS)}"
    if not value.strip():
        dialogue.parameters.pop(name, None)
        return f"{name}: {dialogue.defaults.get(name, 'the default of the model')}"
    try:
        number = PARAMETERS[name].type(value)
        check_parameter(name, number, dialogue.limits)
    except ValueError:
        return f"{value!r} is no number for {name}"
    except ServiceError as error:
        return error.message
    dialogue.parameters[name] = number
    return f"{name}: {number}"


def _image(dialogue: Dialogue, rest: str) -> str:
    if not rest:
        return "/image FILE: which file?"
    try:
        dialogue.images.append(dialogue.read_image(rest))
    except ServiceError as error:
        return error.message
    return f"{len(dialogue.images)} with the next question"


def _retry(dialogue: Dialogue, rest: str) -> str | None:
    if dialogue.unanswered:
        dialogue.asked(dialogue.unanswered)
        return None
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


def _exit(dialogue: Dialogue, rest: str) -> str:
    dialogue.has_ended = True
    return ""


_COMMANDS: Mapping[str, Callable[[Dialogue, str], str | None]] = {
    "help": _help,
    "clear": _clear,
    "system": _system,
    "set": _set,
    "image": _image,
    "retry": _retry,
    "undo": _undo,
    "stats": _stats,
    "exit": _exit,
    "quit": _exit,
}
