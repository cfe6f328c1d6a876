"""Builds the JSON documents that speedscope opens, from sampled stacks with weights. Pure.

The format is https://www.speedscope.app/file-format-schema.json: frames once, and profiles of samples, each a list of
frames from the outermost call on.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class Frame(NamedTuple):
    """A line of a function."""

    name: str
    file: str
    line: int


Stack = tuple[Frame, ...]  # the outermost call first


class SampledProfile(NamedTuple):
    """Stacks in the order in which they were seen, each with how much of `unit` it stands for."""

    name: str
    unit: str  # "seconds", "bytes" or "none"
    stacks: Sequence[Stack]
    weights: Sequence[float]


def document(name: str, profiles: Sequence[SampledProfile], exporter: str) -> bytes:
    """Returns the document of these profiles, encoded."""
    indices: dict[Frame, int] = {}
    made = []
    for profile in profiles:
        samples = [[indices.setdefault(frame, len(indices)) for frame in stack] for stack in profile.stacks]
        made.append(
            {
                "type": "sampled",
                "name": profile.name,
                "unit": profile.unit,
                "startValue": 0,
                "endValue": sum(profile.weights),
                "samples": samples,
                "weights": list(profile.weights),
            }
        )
    shared = {"frames": [frame._asdict() for frame in indices]}
    whole = {"$schema": SCHEMA, "name": name, "exporter": exporter, "shared": shared, "profiles": made}
    return json.dumps({**whole, "activeProfileIndex": 0}, separators=(",", ":")).encode()
