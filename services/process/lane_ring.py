"""The ring of a lane: names and addresses of its processes, in the run directory of the service."""

import dataclasses
import re
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.model_table import FIRST, LaneEntry, names_of, prefix_of, with_options

ENGINES_FILE = "engines.toml"  # in the run directory; see `services.process.engine_table`
_OF_LANE = re.compile(r"(?:worker-)?(m\d+)-")


def address_of(directory: Path, name: str) -> str:
    """Returns the inbox of a process of the ring."""
    return f"ipc://{directory}/{name}"


def lane_of(process: str) -> str:
    """Returns the lane of a process, by its id."""
    found = _OF_LANE.match(process)
    return found[1] if found else FIRST


def ring_of(service: ServiceConfig, directory: Path, lane: str = FIRST, *, scales: bool = True) -> ServiceConfig:
    """Returns the settings with the peers of every process of a lane. `scales`: engines are in a file, as they join and
    leave."""
    # Gateways have one name in all rings, and an inbox in each.
    gateways = ((name, f"{prefix_of(lane)}{name}") for name in names_of(FIRST, Role.GATEWAY, service.gateways))
    return dataclasses.replace(
        service,
        gateway_peers=",".join(f"{name}={address_of(directory, inbox)}" for name, inbox in gateways),
        tokenizer_peers=_peers(directory, names_of(lane, Role.TOKENIZER, service.tokenizers)),
        detokenizer_peers=_peers(directory, names_of(lane, Role.DETOKENIZER, service.detokenizers)),
        engine_peers="" if scales else _peers(directory, names_of(lane, Role.ENGINE, service.engines)),
        engines_file=str(directory / ENGINES_FILE) if scales else "",
    )


def lane_settings(
    engine: EngineConfig, service: ServiceConfig, directory: Path, lane: str, entry: LaneEntry
) -> tuple[EngineConfig, ServiceConfig]:
    """Returns the settings of the processes of a lane; `service` is that of the service."""
    engine, service = with_options(engine, service, entry)
    return engine, ring_of(dataclasses.replace(service, models=""), directory, lane, scales=False)


def _peers(directory: Path, names: tuple[str, ...]) -> str:
    return ",".join(f"{name}={address_of(directory, name)}" for name in names)
