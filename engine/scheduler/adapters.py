"""The adapters of open requests: which of them are loaded, and which are wanted next.

Joins requests to the `Shelf`: counts the open requests of each adapter, and says once a step what the queue needs. An
adapter stays on the shelf as long as an open request names it. Pure: no files, no tensors, no clock.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.plan import NO_ADAPTER
from sluice_server.engine.request import AdapterRef, EngineRequest
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.waiting import WaitingQueue

WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestAdapters:
    """The adapters of one engine's requests. Base requests pass all methods without an effect."""

    def __init__(self, shelf: Shelf, turn_s: float) -> None:
        """`turn_s`: seconds that a request waits for its adapter before others have to make room for it."""
        self.shelf = shelf
        self.waits = Histogram(WAIT_S)  # seconds that requests waited for their adapter, of those that did
        self.num_running = 0  # sequences, at the last look
        self._turn_s = turn_s
        self._now = 0.0
        self._waiting_since: dict[str, float] = {}  # by request
        self._num_open: Counter[bytes] = Counter()
        self._doomed: set[bytes] = set()  # to be dropped once no request names them

    @property
    def num_open(self) -> Counter[bytes]:
        """Open requests by adapter."""
        return self._num_open

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapter."""
        return len(self._waiting_since)

    def expect(self, request: EngineRequest) -> None:
        """Makes a request's adapter known. Raises ServiceError if there is never room for it."""
        if request.adapter is not None:
            self.add(request.adapter)

    def add(self, adapter: AdapterRef) -> None:
        """Makes an adapter known. Raises ServiceError if there is never room for it."""
        try:
            self.shelf.add(adapter.digest, adapter.num_bytes)
        except ValueError as error:
            raise _too_large(adapter.num_bytes, error, self.shelf.bounded_by) from None

    def enter(self, request: EngineRequest) -> None:
        """Counts a request that was opened."""
        if request.adapter is not None:
            self._num_open[request.adapter.digest] += 1

    def leave(self, request: EngineRequest) -> None:
        """Counts a request that has ended."""
        if request.adapter is None:
            return
        self._waiting_since.pop(request.request_id, None)
        digest = request.adapter.digest
        self._num_open[digest] -= 1
        if not self._num_open[digest]:
            del self._num_open[digest]
            if digest in self._doomed:
                self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Drops an adapter once no open request names it."""
        if self._num_open[digest]:
            self._doomed.add(digest)
            return
        self._doomed.discard(digest)
        if self.shelf.has(digest):
            self.shelf.remove(digest)

    def keep(self, digest: bytes) -> None:
        """Takes back that an adapter is to be dropped."""
        self._doomed.discard(digest)

    def are_ready(self, request: EngineRequest) -> bool:
        """Returns whether a sequence of the request may begin to run."""
        if request.adapter is None or self.shelf.is_ready(request.adapter.digest):
            return True
        self._waiting_since.setdefault(request.request_id, self._now)
        return False

    def hold(self, request: EngineRequest) -> int:
        """Returns the adapter's slot for a sequence that begins to run, and counts it."""
        if request.adapter is None:
            return NO_ADAPTER
        since = self._waiting_since.pop(request.request_id, None)
        if since is not None:
            self.waits.observe(self._now - since)
        return self.shelf.hold(request.adapter.digest)

    def give(self, request: EngineRequest) -> None:
        """Counts a sequence that no longer runs."""
        if request.adapter is not None:
            self.shelf.give(request.adapter.digest)

    def are_in_the_way(self, request: EngineRequest) -> bool:
        """Returns whether a paused sequence of the request keeps its adapter's slot from the one whose turn it is."""
        return request.adapter is not None and self.shelf.drains(request.adapter.digest)

    def look_over(self, waiting: WaitingQueue, running: Collection[Sequence], now: float) -> None:
        """Has the shelf order what the queue needs; called once a step. If all that runs is paused, no one's turn has
        to be waited for."""
        queue: dict[bytes, bool] = {}
        self._now, self.num_running = now, len(running)
        if waiting.num_with_adapter:
            is_idle = all(one.is_idle for one in running)
            for sequence in waiting:
                adapter = sequence.group.request.adapter
                if adapter is not None:
                    is_late = is_idle or now - sequence.group.request.arrival_s > self._turn_s
                    queue[adapter.digest] = queue.get(adapter.digest, False) or is_late
        if queue or self.shelf.has_pins:
            self.shelf.look_over(queue)

    def take_failed(self, groups: Iterable[SequenceGroup]) -> Iterator[tuple[SequenceGroup, ServiceError]]:
        """Yields those of these groups whose adapter was found gone since the last call, and their error."""
        lost = self.shelf.take_lost()
        for group in groups if lost else ():
            adapter = group.request.adapter
            if adapter is not None and adapter.digest in lost:
                yield group, adapter_lost(adapter.digest)

    def check(self, open_requests: Iterable[EngineRequest], running: Iterable[EngineRequest]) -> None:
        """Asserts that all counts are right; for tests and simulation."""
        self.shelf.check()
        assert +self._num_open == Counter(one.adapter.digest for one in open_requests if one.adapter is not None)
        refs = Counter(one.adapter.digest for one in running if one.adapter is not None)
        assert refs == +self.shelf.refs(), "an adapter is held by other sequences than those that run with it"


NO_ADAPTERS = RequestAdapters(Shelf(0, 0, 0), 0.0)  # of engines whose requests name none; never changed


def _too_large(num_bytes: int, error: ValueError, option: str) -> ServiceError:
    """Returns the error for an adapter that there is never room for."""
    text = f"adapter: it takes {num_bytes} bytes, and {error}: start the server with a larger {option}"
    details = {"actual": str(num_bytes)}
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_CAPACITY", text, field="adapter", details=details)


def adapter_lost(digest: bytes) -> ServiceError:
    """Returns the error for a request whose adapter is no longer in the folder of adapters as it was."""
    text = f"adapter: the one with digest {digest.hex()[:16]}… is no longer in --adapter-dir as it was when it was "
    text += "loaded; it cannot be read again: load it anew, then send the request again"
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_LOST", text, field="adapter")
