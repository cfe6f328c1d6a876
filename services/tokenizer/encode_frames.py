"""Defines the frames between an encoding child and its parent: an EncoderSetup, then Tasks and EncodedMessages."""

import msgspec

from sluice_server.engine.request import Limits
from sluice_server.services.messages.messages import Append, Submit
from sluice_server.services.tokenizer.encoding import RenderedChat


class EncoderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer to load, and the limits of requests."""

    directory: str
    limits: Limits


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to encode. `start` is its arrival by the monotonic clock, which all processes of a machine share."""

    message: Submit | Append
    start: float
    rendered: RenderedChat | None  # the message's chat, rendered
