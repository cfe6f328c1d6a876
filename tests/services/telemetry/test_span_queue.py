"""The queue of spans: a dead, slow or broken collector costs spans and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from threading import Event, Semaphore

import pytest

from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.queue import MAX_BATCH, QUEUE_SIZE, SpanQueue
from sluice_server.services.telemetry.spans import EndedSpan, Parent
from sluice_server.services.telemetry.tracing import Tracer

PHASE = Phase("queue", 1.0, 2.5)
SPAN = EndedSpan(PHASE, Parent(""))
NEVER = 1000.0  # lest something is sent before its time on a machine that others use too


class Collector:
    """A collector that answers `answer` and notes the number of spans in each call."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        self.answer = answer
        self.sent: list[int] = []
        self.came = Semaphore(0)
        self.is_closed = False

    def send(self, batch: Sequence[EndedSpan]) -> bool:
        self.sent.append(len(batch))
        self.came.release()
        return self.answer()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def stuck() -> Iterator[tuple[Collector, Event]]:
    """A collector that takes nothing until it is released."""
    is_free = Event()
    yield Collector(lambda: is_free.wait(60)), is_free
    is_free.set()


def put(queue: SpanQueue, num: int) -> None:
    for _ in range(num):
        queue.put(SPAN)


def test_a_stuck_collector_costs_spans_and_nothing_else(stuck: tuple[Collector, Event]) -> None:
    collector, is_free = stuck
    queue = SpanQueue(collector, size=16, delay_s=NEVER)
    put(queue, 500)  # returns at once, or the test times out
    assert (queue.counts["queued"], queue.counts["dropped"]) == (16, 484)
    is_free.set()
    queue.shutdown()
    assert sum(collector.sent) == queue.counts["exported"] == 16 and collector.is_closed


def test_batches_grow_while_they_are_taken_and_all_is_sent_at_the_end() -> None:
    collector = Collector(lambda: True)
    queue = SpanQueue(collector, delay_s=NEVER)
    put(queue, MAX_BATCH - 1)  # not yet enough to wake it
    queue.shutdown()
    assert collector.sent == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert queue.counts == {"queued": 2047, "dropped": 0, "exported": 2047, "failed": 0}


def test_a_full_batch_is_sent_before_its_time() -> None:
    collector = Collector(lambda: True)
    queue = SpanQueue(collector, delay_s=NEVER)
    put(queue, MAX_BATCH)
    assert collector.came.acquire(timeout=60)
    queue.shutdown()
    assert max(collector.sent) <= MAX_BATCH and queue.counts["exported"] == MAX_BATCH


def test_a_collector_that_fails_is_tried_with_single_spans_and_batches_grow_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step that runs while spans are encoded waits for the interpreter: a dead collector must not cause that."""
    answers = iter([True, True, True, False, False, False])
    is_free = Event()
    collector = Collector(lambda: is_free.wait(60) and next(answers, True))
    queue = SpanQueue(collector, delay_s=0.001)
    put(queue, 100)
    is_free.set()
    for _ in range(9):
        assert collector.came.acquire(timeout=60)
    queue.shutdown()
    assert collector.sent[:9] == [1, 2, 4, 8, 1, 1, 1, 2, 4], "only the first failure is a whole batch's"
    assert queue.counts == {"queued": 100, "dropped": 0, "exported": 90, "failed": 10}
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"


def test_the_end_does_not_wait_for_a_dead_collector() -> None:
    collector = Collector(lambda: False)
    queue = SpanQueue(collector, delay_s=NEVER)
    put(queue, 40)
    queue.shutdown()
    assert queue.counts["failed"] == 40 and collector.sent == [1]


def test_what_comes_too_late_fails_untried(stuck: tuple[Collector, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    collector, is_free = stuck
    queue = SpanQueue(collector, delay_s=NEVER)
    put(queue, MAX_BATCH)
    assert collector.came.acquire(timeout=60)
    monkeypatch.setattr("sluice_server.services.telemetry.queue.LAST_S", 0.0)
    queue.shutdown()  # does not wait for the batch that is on its way
    is_free.set()
    queue._thread.join(60)
    assert collector.sent == [1] and queue.counts["exported"] == 1
    assert queue.counts["failed"] == MAX_BATCH - 1


def test_a_batch_that_cannot_be_encoded_does_not_end_the_sending(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([ValueError("no such value")])

    def answer() -> bool:
        for error in answers:
            raise error
        return True

    collector = Collector(answer)
    queue = SpanQueue(collector, delay_s=NEVER)
    put(queue, MAX_BATCH)
    assert collector.came.acquire(timeout=60)
    queue.shutdown()
    assert (queue.counts["failed"], queue.counts["exported"]) == (1, MAX_BATCH - 1)
    assert "1 spans cannot be sent" in caplog.text


def test_what_would_be_dropped_is_not_even_queued(stuck: tuple[Collector, Event]) -> None:
    collector, is_free = stuck
    tracer = Tracer(SpanQueue(collector, delay_s=NEVER))
    tracer.counts["queued"] = QUEUE_SIZE - 1
    for _ in range(3):
        tracer.record("r", Parent(""), PHASE)
    assert (tracer.counts["queued"], tracer.counts["dropped"]) == (QUEUE_SIZE, 2)
    is_free.set()
    tracer.shutdown()
