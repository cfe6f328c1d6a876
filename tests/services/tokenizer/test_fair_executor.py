"""The queue of jobs before an executor: small jobs pass large ones, tenants take turns, the queue is bounded."""

import gc
import weakref
from concurrent.futures import Future

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.tokenizer.fair_executor import SECONDS_PER_BYTE, FairExecutor
from tests.services.executors import OnDemand


class Rig:
    def __init__(self, max_bytes: int = 1000) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.pool = OnDemand()
        self.request: FairExecutor[None] = FairExecutor(self.pool, max_bytes, lambda: self.now)

    def add(self, name: str, size: int = 1, tenant: str = "") -> Future[None]:
        return self.request.submit(tenant, size, lambda: self.done.append(name))

    def run(self, num: int = 100) -> list[str]:
        """Runs that many jobs of the executor."""
        self.done.clear()
        for call in self.pool.waiting[:num]:
            call()
        del self.pool.waiting[:num]
        return list(self.done)


def test_a_small_job_passes_a_large_one_but_not_for_ever() -> None:
    rig = Rig()
    rig.add("large", 500)
    rig.add("small", 10)
    assert rig.run() == ["small", "large"]
    rig.add("large", 500)
    rig.now += 500 * SECONDS_PER_BYTE
    rig.add("small", 10)
    assert rig.run() == ["large", "small"]


def test_tenants_take_turns_by_what_they_have_had() -> None:
    rig = Rig()
    for number in range(4):
        rig.add(f"a{number}", 100, "a")
    rig.add("b0", 300, "b")
    rig.add("b1", 10, "b")
    assert rig.run(4) == ["a0", "b1", "b0", "a1"]
    rig.add("c0", 100, "c")  # a late tenant has no credit for the time before
    assert rig.run() == ["a2", "c0", "a3"] or rig.done == ["c0", "a2", "a3"]


def test_a_tenant_is_ahead_though_nothing_of_it_waits() -> None:
    rig = Rig()
    rig.add("a0", 900, "a")
    rig.add("b0", 10, "b")
    rig.add("b1", 10, "b")
    assert rig.run(2) == ["a0", "b0"]
    rig.add("a1", 1, "a")
    assert rig.run() == ["b1", "a1"]


def test_what_waits_of_a_tenant_is_bounded_in_bytes() -> None:
    rig = Rig(max_bytes=100)
    rig.add("huge", 5000)  # alone it may wait whatever its size
    with pytest.raises(ServiceError) as caught:
        rig.add("more", 1)
    assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert caught.value.retry_after_s > 0 and caught.value.details == {"limit": "100", "actual": "5001"}
    rig.add("other", 60, "b")
    rig.run()
    rig.add("again", 60)
    assert rig.run() == ["again"]


def test_what_is_cancelled_makes_room_and_is_not_done() -> None:
    rig = Rig(max_bytes=100)
    first = rig.add("first", 90)
    assert first.cancel() and rig.run(0) == []
    second = rig.add("second", 90)
    assert rig.run() == ["second"] and second.done() and not second.cancelled()
    rig.add("third", 90)
    assert rig.run() == ["third"]


def test_what_a_job_raises_is_in_its_future() -> None:
    rig = Rig()

    def broken() -> None:
        raise RuntimeError("no")

    future = rig.request.submit("", 1, broken)
    after = rig.add("after", 2)
    rig.run()
    assert isinstance(future.exception(), RuntimeError) and after.result() is None


def test_a_job_that_is_done_is_dropped_without_a_collection_of_garbage() -> None:
    gc.collect()
    gc.disable()
    try:
        rig = Rig()
        done, cancelled = weakref.ref(rig.add("a")), weakref.ref(one := rig.add("b"))
        one.cancel()
        del one
        assert rig.run() == ["a"]
        rig.add("c")
        assert rig.run() == ["c"] and done() is None and cancelled() is None
    finally:
        gc.enable()
