"""Queues jobs in front of an executor: fair between tenants by bytes served, and by due time within a tenant.

A larger job is due later, so a small job passes large ones that came before it, and every job is served in the end. The
bytes that wait for one tenant are limited. Thread-safe.
"""

import dataclasses
import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from sluice_server.engine.errors import Code, ServiceError

SECONDS_PER_BYTE = 10e-6  # from a job's arrival until it is due: about ten times the time of encoding
MAX_WAITING_BYTES = 8 << 20  # for one tenant in one queue: some seconds of work

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True, order=True)
class _QueuedJob(Generic[_T]):
    due: float
    number: int  # in order of arrival
    size: int = dataclasses.field(compare=False)
    # None: started or cancelled. A job that kept its future would be kept by that, through what a cancel calls: both
    # would live, with the result, until garbage is collected.
    work: "tuple[Future[_T], Callable[[], _T]] | None" = dataclasses.field(compare=False)


@dataclasses.dataclass(slots=True)
class _Tenant(Generic[_T]):
    """The queue of one tenant.

    Attributes:
        num_bytes: bytes that wait.
        served: bytes that were started. A new tenant starts with the count of the tenant served last.
    """

    jobs: list[_QueuedJob[_T]] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    served: int = 0


class FairExecutor(Generic[_T]):
    """A fair queue in front of an executor, which gets one call for each job; the call selects its job when it runs."""

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
        self._tenants: dict[str, _Tenant[_T]] = {}  # with waiting jobs, or ahead of the tenant served last
        self._served = 0  # bytes of the tenant that was served last, before that job
        self._num_jobs = 0

    def submit(self, tenant: str, size: int, call: Callable[[], _T]) -> "Future[_T]":
        """Queues a job of `size` bytes and returns its future; a cancelled job leaves the queue.

        Raises ServiceError QUEUE_FULL when the tenant would have more than `max_bytes` waiting; its only job is always
        accepted.
        """
        future: Future[_T] = Future()
        with self._lock:
            own = self._tenants.setdefault(tenant, _Tenant(served=self._served))
            if own.num_bytes and own.num_bytes + size > self._max_bytes:
                raise _full(own.num_bytes, size, self._max_bytes)
            self._num_jobs += 1
            job = _QueuedJob(self._clock() + size * SECONDS_PER_BYTE, self._num_jobs, size, (future, call))
            own.served = own.served if own.jobs else max(own.served, self._served)
            own.num_bytes += size
            heapq.heappush(own.jobs, job)
        future.add_done_callback(lambda done: self._give_up(own, job) if done.cancelled() else None)
        self._executor.submit(self._run_next)
        return future

    def _give_up(self, own: _Tenant[_T], job: _QueuedJob[_T]) -> None:
        with self._lock:
            if job.work is not None:
                job.work = None
                own.num_bytes -= job.size

    def _run_next(self) -> None:
        """Runs one job on a thread of the executor."""
        taken = self._take()
        if taken is None:
            return
        future, call = taken
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except Exception as error:  # raised again by the future's `result`
            future.set_exception(error)

    def _take(self) -> "tuple[Future[_T], Callable[[], _T]] | None":
        """Removes and returns the next job; None when all that were left are cancelled."""
        with self._lock:
            for own in self._tenants.values():
                while own.jobs and own.jobs[0].work is None:
                    heapq.heappop(own.jobs)
            waiting = [own for own in self._tenants.values() if own.jobs]
            if not waiting:
                self._tenants.clear()
                return None
            own = min(waiting, key=lambda one: one.served)
            job = heapq.heappop(own.jobs)
            work, job.work = job.work, None
            assert work is not None
            self._served = own.served
            own.served += job.size
            own.num_bytes -= job.size
            self._tenants = {name: one for name, one in self._tenants.items() if one.jobs or one.served > self._served}
            return work


def _full(waiting: int, wanted: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{waiting} bytes of prompts wait to be encoded for this client and this one has {wanted}; at most {limit} "
        "may wait: try again later",
        details={"limit": str(limit), "actual": str(waiting + wanted)},
        retry_after_s=1.0,
    )
