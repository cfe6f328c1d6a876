"""What a supervisor has beside the processes of its start."""

import dataclasses

from sluice_server.services.supervisor.early import EarlyTemplate
from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.scale import EngineScale


@dataclasses.dataclass(frozen=True, slots=True)
class Moving:
    """What joins and leaves while a service runs: engines of one model, and models; and the kinds of templates from
    which processes are forked, of which the first may have been started already."""

    engines: EngineScale | None = None
    lanes: Lanes | None = None
    templates: tuple[str, ...] = ()
    early: EarlyTemplate | None = None


NOTHING = Moving()
