"""Phases: completed parts of a request's life, as plain values that stages report and spans are made of.

Times are of the monotonic clock. Every stage can import this module: it uses no telemetry library.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from sluice_server.services.messages.messages import Envelope

Value: TypeAlias = str | int | float | bool
Attribute: TypeAlias = Value | tuple[str, ...]


class PhaseEvent(msgspec.Struct, frozen=True, gc=False):
    """An event at one moment of a phase."""

    name: str
    at_s: float
    attributes: Mapping[str, Value] = {}


class Phase(msgspec.Struct, frozen=True, gc=False):  # made in a quarter of a NamedTuple's time; seven per request
    """A phase from `start_s` to `end_s`. `error` names what failed, or is ""; `links` are other spans' W3C headers."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = {}
    span_events: tuple[PhaseEvent, ...] = ()
    error: str = ""
    links: tuple[str, ...] = ()


Record = Callable[[Envelope, Phase], None]  # the envelope has the request and the parent span
