"""What gateways and engines say of lanes: who serves them, has something open there, or has an empty cache. Pure."""

from collections.abc import Mapping

from sluice_server.services.process.lane_ring import lane_of
from sluice_server.services.supervisor.heard import Names
from sluice_server.services.supervisor.lane import Lane

NONE: Names = frozenset()


class LaneReports:
    """Notes what is said of the lanes of one service. The mapping is its owner's, who changes it."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes

    def heard(self, gateway: str, serving: Names, drained: Names, busy: Names, waiting: Names) -> None:
        """Takes what a gateway says: which lanes serve there; which have nothing in the ring any more since they were
        asked for the n-th time to leave or to sleep (`m1@n`); which have something open; for which requests wait."""
        for name, lane in self._lanes.items():
            last = f"{name}@{lane.entry.leaves}"
            told = (
                (lane.serving, name in serving),
                (lane.drained, last in drained),
                (lane.busy, name in busy),
                (lane.waiting, name in waiting),
            )
            for gateways, is_so in told:
                (gateways.add if is_so else gateways.discard)(gateway)

    def heard_of_cache(self, engine: str, is_empty: bool) -> None:
        """Takes what an engine says: whether its cache is empty, and its memory given back."""
        lane = self._lanes.get(lane_of(engine))
        if lane is not None:
            (lane.emptied.add if is_empty else lane.emptied.discard)(engine)

    def gateway_ended(self, name: str) -> None:
        """Forgets what a gateway said that has ended."""
        self.heard(name, NONE, NONE, NONE, NONE)
