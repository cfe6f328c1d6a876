"""How lanes leave: they are unloaded or given up, or fall asleep once gateways have nothing open there. Pure."""

from collections.abc import Callable, Sequence

import msgspec

from sluice_server.services.process.model_table import LaneState
from sluice_server.services.supervisor import lane_sleep
from sluice_server.services.supervisor.lane import Lane, LaneProcesses
from sluice_server.services.supervisor.lane_table import LaneTable


class LaneEnds:
    """Ends the lanes of a service, and has them sleep.

    Attributes:
        ending: unloaded ones whose processes may not have ended yet.
    """

    def __init__(self, table: LaneTable, say: Callable[[str], None]) -> None:
        """`table`: the lanes of the service, which leave it here."""
        self.ending: dict[str, Lane] = {}
        self._table = table
        self._lanes = table.lanes
        self._say = say

    def take_ended(self, processes: LaneProcesses) -> list[Lane]:
        """Returns those of which no process is left, once."""
        return [self.ending.pop(name) for name in [*self.ending] if not processes.is_lane_there(name)]

    def go_on(self, name: str, now_s: float, gateways: set[str], processes: LaneProcesses) -> None:
        """Ends a lane that leaves, or has it sleep, once gateways have nothing open there, or its time is over."""
        lane = self._lanes[name]
        assert lane.until_s is not None, "it leaves"
        if lane_sleep.is_called_back(lane):
            self._say(f"sluice: the model {lane.entry.model} does not sleep: requests wait for it")
            lane_sleep.stay(lane, now_s)
            self._table.write()
        elif not gateways <= lane.drained and now_s <= lane.until_s:
            return
        elif not lane.sleeps:
            self._end(name, processes)
        elif lane.is_light and lane.has_processes:
            lane_sleep.nap(lane)
            self._table.write()
            self._say(f"sluice: the model {lane.entry.model} sleeps, and keeps its weights")
        else:
            lane_sleep.fall_asleep(lane)
            self._table.write()
            processes.dismiss_lane(name)
            self._say(f"sluice: the model {lane.entry.model} sleeps")

    def make_room(self, lanes: Sequence[Lane], other: Lane, now_s: float) -> None:
        """Has lanes fall asleep for another one, once what they have open has ended."""
        for lane in lanes:
            self._say(f"sluice: the model {lane.entry.model} makes room for {other.entry.model}")
            lane_sleep.make_room(lane, now_s)
        if lanes:
            self._table.write()

    def unload(self, name: str, grace_s: float, now_s: float, processes: LaneProcesses) -> None:
        """Has a lane leave once its requests have ended, or after `grace_s`; at once if it sleeps."""
        lane = self._lanes[name]
        is_asleep = lane.entry.sleep_level > 0
        lane.wanted_s, lane.sleeps, lane.is_light = None, False, False
        lane.entry = msgspec.structs.replace(lane.entry, grace_s=grace_s)
        lane.leave(LaneState.DRAINING, min(now_s + grace_s, lane.until_s or now_s + grace_s))
        limit = f", or in {grace_s:g} s" if grace_s < lane_sleep.FOREVER_S else ""
        self._say(f"sluice: the model {lane.entry.model} leaves once its requests have ended{limit}")
        if is_asleep:
            self._end(name, processes)

    def give_up(self, name: str, why: str, processes: LaneProcesses) -> None:
        """Ends a lane that has not served; the table says why."""
        self._table.names.give_up(name, self._lanes[name].entry.model, why)
        self._end(name, processes)

    def _end(self, name: str, processes: LaneProcesses) -> None:
        lane = self.ending[name] = self._lanes.pop(name)
        self._table.write()
        processes.dismiss_lane(name)
        if lane.until_s is not None:
            self._say(f"sluice: the model {lane.entry.model} was unloaded")
