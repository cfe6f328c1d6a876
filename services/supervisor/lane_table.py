"""The table of models as the supervisor has it, and the file that gateways read it from. Pure, except for the file."""

from collections.abc import Callable
from pathlib import Path

from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, write_table
from sluice_server.services.supervisor.lane import Lane
from sluice_server.services.supervisor.lane_names import LaneNames


class LaneTable:
    """The table of one service.

    Attributes:
        lanes: those that come and go, by name.
        fixed: the entries of those without which the service is not.
        names: the names of the models.
    """

    def __init__(self, first: ModelTable, directory: Path, say: Callable[[str], None]) -> None:
        """`first`: the table at the start; its lanes in state READY are fixed. Raises OSError if the file cannot be
        written."""
        self.fixed = {name: entry for name, entry in first.lanes.items() if entry.state is LaneState.READY}
        self.lanes: dict[str, Lane] = {}
        self.names = LaneNames(first)
        self._directory = directory
        self._say = say
        self._number = len(first.lanes)  # of the next lane
        self._is_unwritten = self._is_told = False
        write_table(directory, first)

    @property
    def entries(self) -> dict[str, LaneEntry]:
        """All lanes as gateways read them."""
        return {**self.fixed, **{name: lane.entry for name, lane in self.lanes.items()}}

    @property
    def defaults(self) -> set[str]:
        """The models of requests that name none."""
        return self.names.defaults(next((one.model for one in self.entries.values()), ""))

    def add(self, lane: Lane) -> str:
        """Adds a lane; returns its name, which no other one has had."""
        name, self._number = f"m{self._number}", self._number + 1
        self.lanes[name] = lane
        return name

    def write(self) -> None:
        """Writes the file; what fails is tried again by `write_later`."""
        names = self.names
        table = ModelTable(self.entries, names.default, names.aliases, names.given_up)
        try:
            write_table(self._directory, table)
        except OSError as error:  # a full disk, or the loss of the run directory
            if not self._is_unwritten:
                self._say(f"sluice: the table of models cannot be written ({error.strerror}); gateways follow later")
            self._is_unwritten = True
        else:
            self._is_unwritten = self._is_told = False

    def write_later(self) -> None:
        """Writes the file if that failed before."""
        if self._is_unwritten:
            self.write()

    def take_news(self) -> bool:
        """Returns whether the file was written since the last call."""
        is_told, self._is_told = self._is_told, True
        return not is_told
