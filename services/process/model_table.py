"""The models of a service, in a file that its supervisor writes and its gateways read again when it changes.

Each model is a lane: a tokenizer, engines and a detokenizer of its own behind the gateways of all. The file also has
the aliases, so that all gateways agree on them.
"""

import dataclasses
import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import private

FILE = "models.json"
MAX_BYTES = 16 << 20
FIRST = "m0"  # the lane whose processes have no prefix in their names
OF_SERVICE = (  # settings of a service that a model may have of its own, beside those of its engines
    *("chat_template", "tool_call_parser", "reasoning_parser", "max_prompt_bytes", "media_workers"),
    *("engines", "tokenizers", "detokenizers", "encoding_threads", "routing"),
)
Options: TypeAlias = dict[str, str | int | float | bool]  # settings by name, over those of the service


class LaneState(enum.StrEnum):
    """The state of a lane."""

    LOADING = "loading"  # its processes start, or one of them does again
    READY = "ready"
    DRAINING = "draining"  # it is being unloaded
    DOZING = "dozing"  # it will sleep when what it has open has ended; new requests wait
    NAPPING = "napping"  # asleep at level 1: until it is asked for its processes have the weights, and an empty cache
    SLEEPING = "sleeping"  # asleep at level 2: it has no processes until it is asked for
    FAILED = "failed"  # its processes end again and again; they are started more and more seldom


class PlannedBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of a lane may take of the host's memory.

    Attributes:
        weights, cache, workspace, tiers: as `engine.worker.startup.planned` says of an engine, of all processes.
        cache_tokens: the size of the cache of each engine at the start; 0 where it was not planned.
    """

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    tiers: int = 0
    cache_tokens: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.workspace + self.tiers


UNPLANNED = PlannedBytes()


class LaneEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lane of the table.

    Attributes:
        model: its id in requests.
        source, revision: as `--model` and `--revision` take them.
        options: its own settings.
        why: what it failed by.
        grace_s: how long what is open may go on while it drains.
        planned: the memory that it may take.
        starts: how often its processes were started.
        leaves: how often it was asked to leave or to sleep: what gateways say of that has this number.
        is_empty: while it naps, whether its engines have given the memory of their cache back.
    """

    model: str
    source: str
    revision: str = ""
    options: Options = {}
    state: LaneState = LaneState.LOADING
    why: str = ""
    pinned: bool = False
    grace_s: float = 0.0
    planned: PlannedBytes = UNPLANNED
    starts: int = 0
    leaves: int = 0
    is_empty: bool = False

    @property
    def sleep_level(self) -> int:
        """How deeply it sleeps; 0 if it does not."""
        return {LaneState.NAPPING: 1, LaneState.SLEEPING: 2}.get(self.state, 0)


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table.

    Attributes:
        default: the name that requests without one have; "" for the first model.
        aliases: weights by model, by alias.
        given_up: by lane, why a model that was to be loaded was not.
    """

    lanes: dict[str, LaneEntry] = {}
    default: str = ""
    aliases: dict[str, dict[str, int]] = {}
    given_up: dict[str, str] = {}


def prefix_of(lane: str) -> str:
    """Returns what the names of a lane's processes begin with."""
    return "" if lane == FIRST else f"{lane}-"


def names_of(lane: str, role: Role, num: int) -> tuple[str, ...]:
    """Returns the ids of a lane's processes of one role."""
    return tuple(f"{prefix_of(lane)}{role}-{at}" for at in range(num))


def write_table(directory: Path, table: ModelTable) -> None:
    """Replaces the file. Raises OSError."""
    fresh = directory / f"{FILE}.new"
    fresh.unlink(missing_ok=True)
    with os.fdopen(private.open_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(msgspec.json.encode(table))
    fresh.replace(directory / FILE)


def read_table(directory: Path) -> ModelTable:
    """Returns the table. Raises ServiceError."""
    path = directory / FILE
    try:
        with os.fdopen(private.open_file(path, os.O_RDONLY), "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=ModelTable)
    except (OSError, msgspec.DecodeError) as error:
        raise ServiceError(Code.INTERNAL, "MODEL_TABLE", f"{path} cannot be read: {error}") from error


def with_options(engine: EngineConfig, service: ServiceConfig, entry: LaneEntry) -> tuple[EngineConfig, ServiceConfig]:
    """Returns the settings of a model's processes: its own over those of the service. A cache that would size itself
    has the size that was planned."""
    engine = dataclasses.replace(engine, **_of(EngineConfig, entry.options))
    if entry.planned.cache_tokens and not engine.kv_cache_tokens:
        engine = dataclasses.replace(engine, kv_cache_tokens=entry.planned.cache_tokens)
    own = {name: value for name, value in entry.options.items() if name in OF_SERVICE}
    return engine, dataclasses.replace(
        service,
        model=entry.source,
        revision=entry.revision,
        served_model_name=entry.model,
        **_of(ServiceConfig, own),
    )


def _of(cls: type[Any], options: Mapping[str, object]) -> dict[str, Any]:
    """Returns the options that are fields of a class."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in options.items() if name in names}
