"""The requests for a model that does not serve at present and will: it sleeps, wakes, or is being loaded.

They are admitted as always, and kept until the model serves: one start of its processes serves all that has gathered.
A request that has waited for too long, or past its deadline, ends. Stands between the request manager and the watch
over the ring; time is passed in.
"""

import enum
from collections.abc import Callable

from sluice_server.engine.errors import Code, ServiceError, deadline_exceeded
from sluice_server.services.gateway.models.registry import unavailable
from sluice_server.services.gateway.recovery.watch import RingWatch
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.process.model_table import LaneEntry, LaneState


class Rest(enum.Enum):
    """Whether a model serves."""

    AWAKE = enum.auto()  # the ring decides
    DOZING = enum.auto()  # what was sent to the ring goes on; what is new is kept
    ASLEEP = enum.auto()  # there is no ring, or one that is not to be used
    STARTING = enum.auto()  # the ring is being started


class WaitingRequests:
    """The requests of one lane that wait.

    Attributes:
        rest: whether the model serves.
    """

    def __init__(
        self, manager: RequestManager, watch: RingWatch, limit_s: float, on_change: Callable[[], None]
    ) -> None:
        """`limit_s`: how long a request may wait. `on_change` is called when one begins to."""
        self.rest = Rest.AWAKE
        self._manager = manager
        self._watch = watch
        self._limit_s = limit_s
        self._on_change = on_change
        self._kept: list[OpenRequest] = []
        self._starts = -1  # the start of the lane's processes that the ring is of

    @property
    def is_resting(self) -> bool:
        """Whether requests are kept for lack of a ring that serves."""
        return self.rest is not Rest.AWAKE

    @property
    def num_running(self) -> int:
        """Open requests of clients that were sent to the ring."""
        kept = sum(request.outcome is None for request in self._kept)
        return self._manager.num_open - kept if self.rest is Rest.DOZING else 0

    @property
    def is_waited_for(self) -> bool:
        """Whether requests of clients wait."""
        if self.rest is Rest.AWAKE:
            return False
        waiting = self._kept if self.rest is Rest.DOZING else self._manager.requests
        return any(request.outcome is None and not request.is_own for request in waiting)

    def follow(self, entry: LaneEntry) -> None:
        """Does as the supervisor says of the lane."""
        if entry.sleep_level:
            self._sleep(entry.why)
        elif entry.state is LaneState.DOZING:
            self._doze()
        elif entry.starts != self._starts:
            self._starts = entry.starts
            self._expect(Rest.STARTING)
        elif self.rest is Rest.DOZING:  # it is to serve after all
            self._go_on()
        elif self.rest is Rest.ASLEEP:  # the processes are those of the time before
            self._expect(Rest.STARTING)
        if entry.state is LaneState.FAILED and self.rest is Rest.STARTING:
            self.give_up(unavailable(entry.model, entry.why))

    def beat(self, now_s: float) -> None:
        """Ends what has waited for too long, and notes that the model serves."""
        if self.rest is Rest.STARTING and not self._watch.is_expected:
            self.rest = Rest.AWAKE
        if self.rest is Rest.AWAKE:
            return
        waiting = self._kept if self.rest is Rest.DOZING else self._manager.requests
        for request in waiting:
            if request.is_own or request.outcome is not None:
                continue
            if request.replay.is_overdue(now_s):
                request.end(deadline_exceeded())
            elif now_s - request.accounting.started_s > self._limit_s:
                request.end(too_long(request.envelope.model, self._limit_s))

    def give_up(self, error: ServiceError) -> None:
        """Ends what waits, and refuses what is new, until the model serves."""
        self.rest = Rest.AWAKE
        self._kept.clear()
        self._watch.is_expected = False
        self._manager.hold = None
        if not self._manager.is_draining:
            self._manager.refusal = error
        self._manager.fail_all(error)

    def _doze(self) -> None:
        if self.rest is Rest.AWAKE and self._manager.refusal is None:
            self.rest = Rest.DOZING
            self._manager.hold = self._keep
        elif self.rest in (Rest.AWAKE, Rest.STARTING):  # nothing is in the ring
            self._expect(Rest.ASLEEP)

    def _sleep(self, why: str) -> None:
        if self.rest in (Rest.AWAKE, Rest.DOZING):
            for request in self._manager.requests:
                if not request.is_own and request not in self._kept:
                    request.end(put_to_sleep(request.envelope.model))
        if why:
            self.give_up(ServiceError(Code.RESOURCE_EXHAUSTED, "MEMORY_BUDGET", why, field="model"))
            self.rest = Rest.ASLEEP
        elif self.rest is not Rest.ASLEEP or self._manager.refusal is not None:
            self._expect(Rest.ASLEEP)

    def _go_on(self) -> None:
        """Sends what was kept to the ring, which has been there all the time."""
        self.rest = Rest.AWAKE
        self._manager.hold = None
        kept, self._kept = self._kept, []
        for request in kept:
            if request.outcome is None:
                self._manager.resubmit(request)

    def _expect(self, rest: Rest) -> None:
        """Has all that is open, and what comes, wait for a ring that is to be started."""
        self.rest = rest
        self._kept.clear()
        self._watch.expect()

    def _keep(self, request: OpenRequest) -> None:
        self._kept.append(request)
        self._on_change()


def too_long(model: str, limit_s: float) -> ServiceError:
    """Returns the error of a request that has waited in vain."""
    text = f"model {model!r} has not served within {limit_s:g} s, as long as requests wait for one that sleeps or loads"
    return ServiceError(Code.UNAVAILABLE, "MODEL_SLEEPING", text, details={"model": model}, retry_after_s=1.0)


def put_to_sleep(model: str) -> ServiceError:
    """Returns the error of what is open when its model falls asleep."""
    text = f"model: {model!r} was put to sleep, and the time that its requests had has passed"
    return ServiceError(Code.ABORTED, "MODEL_UNLOADED", text, field="model")
