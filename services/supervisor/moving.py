"""What a supervisor has beside the processes of its start."""

import dataclasses

from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.scale import EngineScale


@dataclasses.dataclass(frozen=True, slots=True)
class Moving:
    """What joins and leaves while a service runs: engines of one model, and models; and the kinds of templates from
    which processes are forked."""

    engines: EngineScale | None = None
    lanes: Lanes | None = None
    templates: tuple[str, ...] = ()


NOTHING = Moving()
