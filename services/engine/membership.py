"""The identity of an engine in the ring."""

import dataclasses
import time
from collections.abc import Callable

from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.ring.leases import Leases


@dataclasses.dataclass(frozen=True, slots=True)
class RingMembership:
    """The identity of this engine in the ring: its id and boot epoch, the gateways' leases, a clock, and its role."""

    id: str
    epoch: int
    leases: Leases = dataclasses.field(default_factory=Leases)
    clock: Callable[[], float] = time.monotonic
    role: EngineRole = EngineRole.BOTH
