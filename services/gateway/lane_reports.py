"""What a gateway tells its supervisor, and its log, of its lanes: which serve, which have nothing open, who waits."""

import logging

from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.models.known import News
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.models.waiting import Rest
from sluice_server.services.process.listening import bound
from sluice_server.services.process.model_table import LaneState, ModelTable
from sluice_server.services.process.supervised import say_lanes, say_ready
from sluice_server.services.process.watched import WatchedFile

logger = logging.getLogger(__name__)

NONE = "none"  # in place of the revision of a default model that does not serve


class LaneReports:
    """The reports of one gateway, made of its lanes and of the table of models.

    Attributes:
        news: told whenever there is a new report.
    """

    def __init__(
        self, gateway: Gateway, service: ServiceConfig, process_id: str, table: WatchedFile[ModelTable]
    ) -> None:
        self.news = News()
        self._gateway = gateway
        self._service = service
        self._process_id = process_id
        self._table = table
        self._told: tuple[object, ...] | None = None
        self._opened: dict[str, int] = {}  # attempts that each lane has had when that was told
        self._has_said_so = False

    def tell(self) -> None:
        """Tells the supervisor what serves, what leaves and has nothing open, and for what requests wait."""
        lanes = list(self._gateway.models)
        serving = frozenset(one.name for one in lanes if one.is_up)
        drained = frozenset(f"{one.name}@{one.leaves}" for one in lanes if self._is_drained(one))
        waiting = frozenset(one.name for one in lanes if one.waiting.is_waited_for)
        opened = {one.name: one.manager.num_sent for one in lanes}
        busy = frozenset(
            one.name for one in lanes if one.manager.num_open or opened[one.name] != self._opened.get(one.name, 0)
        )
        self._opened = opened
        starts = tuple(entry.starts for entry in self._table.value.lanes.values())  # after each, all is said again
        told = serving, drained, busy, waiting, starts, self._gateway.books.leaving
        if told != self._told:
            self._told = told
            self.news.tell()
            say_lanes(self._process_id, serving, drained, busy, waiting)
        if self._service.models and not self._has_said_so and self._gateway.is_listening and self._is_settled():
            self._has_said_so = True
            self.say_serving()

    def say_serving(self) -> None:
        """Reports to the log, and to the supervisor if there is one, that requests are admitted."""
        gateway = self._gateway
        revision = gateway.models.first.manager.settings.model.revision if gateway.is_serving else NONE
        address = bound(self._service.listen, gateway.port)
        logger.info("serving revision %s on %s", revision, address)
        say_ready(self._process_id, f"{address} {revision}")

    def _is_drained(self, lane: Lane) -> bool:
        """Whether a lane that is about to leave, or to sleep, has nothing in its ring."""
        if lane.is_leaving:
            return not lane.manager.num_open
        return lane.waiting.rest in (Rest.DOZING, Rest.ASLEEP) and not lane.waiting.num_running

    def _is_settled(self) -> bool:
        """Whether the default model serves, or is known not to: then the others are served without it."""
        table = self._table.value
        meant = [one for one in table.lanes.values() if one.model in table.aliases.get(table.default, (table.default,))]
        return self._gateway.is_serving or any(one.state is LaneState.FAILED for one in meant)
