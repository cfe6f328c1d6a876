"""What a process that encodes and its parent say to each other: a Setup first, then Tasks, each with what was Made."""

import msgspec

from sluice_server.engine.request import Limits
from sluice_server.services.messages.messages import Append, Submit
from sluice_server.services.tokenizer.encoding import RenderedChat


class EncoderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer, within which limits."""

    directory: str
    limits: Limits
    niceness: int  # how far below its parent's the process's priority is


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to encode, which came at `start` (of the monotonic clock, which all processes of a machine share)."""

    message: Submit | Append
    start: float
    rendered: RenderedChat | None  # its chat
