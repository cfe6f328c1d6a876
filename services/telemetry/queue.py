"""A bounded queue of spans for a collector, emptied by a thread. Counts spans by outcome.

If the collector is dead or slow, the newest spans are dropped and counted at once; `put` never blocks. After a failure,
sending starts again with one span at a time. (The SDK's batching processor accepts only the SDK's own spans.)
"""

import collections
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from sluice_server.services.telemetry.spans import EndedSpan

logger = logging.getLogger(__name__)

QUEUE_SIZE = 8192
DELAY_S = 5.0  # the SDK's default; one export call takes 2 ms of processor time, as much as 300 spans
MAX_BATCH = 2048
LAST_S = 2.0  # to send queued spans at shutdown


class Export(Protocol):
    """Sends batches of spans."""

    def send(self, batch: Sequence[EndedSpan]) -> bool:
        """Send a batch. Returns whether it was accepted."""

    def close(self) -> None:
        """Close the export; a `send` in progress ends soon."""


class SpanQueue:
    """The queue and its thread.

    Attributes:
        counts: how many spans were queued, dropped, exported, failed.
    """

    def __init__(self, export: Export, size: int = QUEUE_SIZE, delay_s: float = DELAY_S) -> None:
        self.counts: dict[str, int] = {"queued": 0, "dropped": 0, "exported": 0, "failed": 0}
        self._export = export
        self._size = size
        self._delay_s = delay_s
        self._waiting: collections.deque[EndedSpan] = collections.deque()
        self._awake = threading.Event()
        self._until_s = math.inf  # set at shutdown: batches after this time fail at once
        self._is_failing = False
        self._most = 1  # spans per batch: doubles with each success, and is 1 again after a failure
        self._thread = threading.Thread(target=self._run, name="otlp-spans", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of queued spans that the collector has not accepted yet."""
        return self.counts["queued"] - self.counts["exported"] - self.counts["failed"]

    def put(self, span: EndedSpan) -> None:
        """Queue a span, or drop and count it. To be called from one thread only."""
        if self.num_waiting >= self._size:
            self.counts["dropped"] += 1
            return
        self.counts["queued"] += 1
        self._waiting.append(span)
        if len(self._waiting) == MAX_BATCH and not self._is_failing:
            self._awake.set()

    def shutdown(self) -> None:
        """Send the queued spans, for at most `LAST_S` and the batch in progress, and close."""
        self._until_s = time.monotonic() + LAST_S
        self._awake.set()
        self._thread.join(2 * LAST_S)
        self._export.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._awake.wait(self._delay_s)
            self._awake.clear()
            is_last = self._until_s < math.inf
            self._empty()
        self._fail(len(self._waiting))

    def _empty(self) -> None:
        """Send queued spans until the queue is empty or a batch fails."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            if time.monotonic() > self._until_s or not self._is_taken(batch):
                self._fail(len(batch))
                return
            self.counts["exported"] += len(batch)
            self._most = min(2 * self._most, MAX_BATCH)
            self._is_failing = False

    def _is_taken(self, batch: Sequence[EndedSpan]) -> bool:
        try:
            return self._export.send(batch)
        except Exception:
            logger.exception("%d spans cannot be sent", len(batch))
            return False

    def _fail(self, num: int) -> None:
        if num and not self._is_failing:
            logger.warning("spans do not reach the collector: until they do they are dropped and counted")
        self._is_failing = self._is_failing or num > 0
        self._most = 1
        self.counts["failed"] += num
