"""A part of a request's life that is over, as plain values: what stages tell, and spans are made of.

Times are of the monotonic clock. Knows no telemetry library, so that every stage may import it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from sluice_server.services.messages.messages import Envelope

Value: TypeAlias = str | int | float | bool
Attribute: TypeAlias = Value | tuple[str, ...]


class PhaseEvent(NamedTuple):
    """Something that happened at one moment of a phase."""

    name: str
    at_s: float
    attributes: Mapping[str, Value] = {}


class Phase(NamedTuple):  # made in a third of a frozen dataclass's time, seven times a request
    """From `start_s` to `end_s`. `error` names what went wrong, or is empty; `links` are W3C headers of other spans."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = {}
    happenings: tuple[PhaseEvent, ...] = ()
    error: str = ""
    links: tuple[str, ...] = ()


Record = Callable[[Envelope, Phase], None]  # the envelope says which request, and under which span
