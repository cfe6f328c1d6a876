"""Jobs that wait for an executor, in a fair order: tenants by what they have had, a tenant's own by when they are due.

A job is due the later the larger it is: a small one passes large ones that came before it, and each has its turn in
the end. What waits of one tenant is bounded in bytes. Thread-safe. Knows no text.
"""

import dataclasses
import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from sluice_server.engine.errors import Code, ServiceError

SECONDS_PER_BYTE = 10e-6  # from a job's coming until it is due: some ten times what encoding takes
MAX_WAITING_BYTES = 8 << 20  # of a tenant, in one lane: some seconds of work

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True, order=True)
class _QueuedJob(Generic[_T]):
    due: float
    number: int  # in the order of their coming
    size: int = dataclasses.field(compare=False)
    future: "Future[_T]" = dataclasses.field(compare=False)
    call: Callable[[], _T] | None = dataclasses.field(compare=False)  # None: it was cancelled


@dataclasses.dataclass(slots=True)
class _Tenant(Generic[_T]):
    """Attributes:
    num_bytes: waiting.
    served: bytes that were begun for it; a tenant that comes anew begins with as many as the one whose turn it is.
    """

    jobs: list[_QueuedJob[_T]] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    served: int = 0


class FairExecutor(Generic[_T]):
    """In front of an executor, which gets a call for each job that came; which job it does is decided when it runs."""

    def __init__(
        self,
        executor: Executor,
        max_bytes: int = MAX_WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant[_T]] = {}  # of which something waits, and those that are ahead of these
        self._served = 0  # of the tenant that had its turn last
        self._num_jobs = 0

    def submit(self, tenant: str, size: int, call: Callable[[], _T]) -> "Future[_T]":
        """What becomes of it; cancelled, it waits no more. Raises `ServiceError` QUEUE_FULL when too much of the
        tenant waits already."""
        future: Future[_T] = Future()
        with self._lock:
            own = self._tenants.setdefault(tenant, _Tenant(served=self._served))
            if own.num_bytes and own.num_bytes + size > self._max_bytes:
                raise _full(own.num_bytes, size, self._max_bytes)
            self._num_jobs += 1
            job = _QueuedJob(self._clock() + size * SECONDS_PER_BYTE, self._num_jobs, size, future, call)
            own.served = own.served if own.jobs else max(own.served, self._served)
            own.num_bytes += size
            heapq.heappush(own.jobs, job)
        future.add_done_callback(lambda done: self._give_up(own, job) if done.cancelled() else None)
        self._executor.submit(self._run_next)
        return future

    def _give_up(self, own: _Tenant[_T], job: _QueuedJob[_T]) -> None:
        with self._lock:
            if job.call is not None:
                job.call = None
                own.num_bytes -= job.size

    def _run_next(self) -> None:
        """On a thread of the executor."""
        taken = self._take()
        if taken is None:
            return
        future, call = taken
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except Exception as error:  # raised again where the future is asked
            future.set_exception(error)

    def _take(self) -> "tuple[Future[_T], Callable[[], _T]] | None":
        """The next job that is still wanted; None when the others were cancelled."""
        with self._lock:
            for own in self._tenants.values():
                while own.jobs and own.jobs[0].call is None:
                    heapq.heappop(own.jobs)
            waiting = [own for own in self._tenants.values() if own.jobs]
            if not waiting:
                self._tenants.clear()
                return None
            own = min(waiting, key=lambda one: one.served)
            job = heapq.heappop(own.jobs)
            call, job.call = job.call, None
            assert call is not None
            self._served = own.served
            own.served += job.size
            own.num_bytes -= job.size
            self._tenants = {name: one for name, one in self._tenants.items() if one.jobs or one.served > self._served}
            return job.future, call


def _full(waiting: int, wanted: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{waiting} bytes of prompts wait to be encoded for this client and this one has {wanted}; at most {limit} "
        "may wait: try again later",
        details={"limit": str(limit), "actual": str(waiting + wanted)},
        retry_after_s=1.0,
    )
