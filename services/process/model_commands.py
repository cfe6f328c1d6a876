"""What gateways ask of the supervisor about models, over a Unix socket in the run directory: one line of JSON each
way."""

from typing import TypeAlias

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process.model_table import UNPLANNED, LaneEntry, PlannedBytes

SOCKET = "models"
MAX_LINE_BYTES = 1 << 20


class LoadLane(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Starts a lane of a model. Where one of that id is being loaded, that one will do. `beside`: what the model of
    `--model` may take, if the service has one."""

    entry: LaneEntry
    beside: PlannedBytes = UNPLANNED


class UnloadLane(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ends the lane of a model once what is open has ended, or in `grace_s`."""

    model: str
    grace_s: float


class SleepLane(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ends the processes of a model once what is open has ended, or in `grace_s`, and keeps its lane. At level 1 the
    processes stay, and their cache is emptied."""

    model: str
    grace_s: float
    level: int = 2


class WakeLane(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Starts the processes of a model that sleeps."""

    model: str


class NameModels(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Makes an alias stand for these models, by weight; without any, it is forgotten."""

    alias: str
    weights: dict[str, int]


Command: TypeAlias = LoadLane | UnloadLane | SleepLane | WakeLane | NameModels


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lane that a command is about, or the error."""

    lane: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    field: str = ""


def refused(error: ServiceError) -> Answer:
    """Returns an error as an answer."""
    return Answer(code=int(error.code), reason=error.reason, message=error.message, field=error.field)
