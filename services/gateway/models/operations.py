"""The operations of all models of a gateway: each goes by the ring that has its process."""

from collections.abc import AsyncGenerator

from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.gateway.models.waiting import Rest
from sluice_server.services.messages.control import Progress, Work


class LaneOperations:
    """The operations of the lanes of one gateway."""

    def __init__(self, models: Models[Lane]) -> None:
        self._models = models

    def carry_out(self, target: str, work: Work, takes_s: float) -> AsyncGenerator[Progress, None]:
        """Yields the answers of a process to work that takes so many seconds. Raises ServiceError."""
        for one in self._awake():
            if target in one.processes:
                return one.operations.carry_out(target, work, takes_s)
        first = self._models.first
        if target not in first.operations.processes:  # gateways are in every ring
            processes = {name for one in self._awake() for name in one.operations.processes}
            raise not_found("process", target, f"this service has {', '.join(sorted(processes))}")
        return first.operations.carry_out(target, work, takes_s)

    def engines(self) -> list[str]:
        """Returns the engines of all models, those of the default model first."""
        first = self._models.first
        return [
            name
            for one in (first, *(one for one in self._awake() if one is not first))
            for name in one.manager.engines.ids
        ]

    def _awake(self) -> list[Lane]:
        """Returns the lanes that have processes."""
        return [one for one in self._models if one.waiting.rest is not Rest.ASLEEP]
