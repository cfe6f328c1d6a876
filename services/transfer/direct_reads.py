"""Reads blocks straight from the memory of engines of other hosts, into buffers that stay apart until they are whole.

A thread of its own has the transfers. What is not done by its deadline is given up, but it may still write, even after
NIXL has let go of it and of the peer: what was under way when a link was cut is written when the link is mended. So a
buffer is used again only when its transfer is done or has failed. If too many are held like that, nothing is read this
way.
"""

import dataclasses
import logging
import mmap
import queue
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from sluice_server.services.transfer.network_frames import Block
from sluice_server.services.transfer.nixl_agent import Agent, TransferFailed
from sluice_server.services.transfer.reading import Reading

logger = logging.getLogger(__name__)

# Transfers with an engine that run at a time; more wait until one has ended. NIXL brings all that run at one pace: they
# end together if they begin together, and nothing would be on its way until the next ones are asked for.
AT_A_TIME = 2
LOOK_S = 0.0002  # between two looks at transfers that are waited for
QUARANTINE_S = 0.1  # the same where all have been given up


@dataclasses.dataclass(frozen=True, slots=True)
class DirectJob:
    """Some blocks of a reading, one after the other from `first` on: their addresses, 0 for those that are gone, and
    checksums. `agent`: metadata of the engine that has them; `on_end` is called once they have come, or have not."""

    engine: str
    agent: bytes
    reading: Reading
    first: int
    places: Sequence[tuple[int, int]]
    on_end: Callable[[], None]


@dataclasses.dataclass(slots=True)
class _UnderWay:
    job: DirectJob
    peer: str
    transfer: object
    buffers: dict[int, int]  # by place among the job's
    is_given_up: bool = False


class Buffers:
    """The memory that blocks are read into.

    Attributes:
        region: its address and size.
        free: numbers of the buffers that no transfer writes to.
    """

    def __init__(self, num: int, block_bytes: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, num * block_bytes), np.uint8)
        self._block_bytes = block_bytes
        self.region: tuple[int, int] = (int(self._memory.ctypes.data), num * block_bytes)
        self.free = list(range(num))

    def address_of(self, buffer: int) -> int:
        """Returns where a buffer begins."""
        return self.region[0] + buffer * self._block_bytes

    def read(self, buffer: int) -> bytes:
        """Returns what is in a buffer."""
        return self._memory[buffer * self._block_bytes : (buffer + 1) * self._block_bytes].tobytes()


class DirectReads:
    """The transfers of one engine.

    Attributes:
        num_given_up: transfers that were not done in time, since start.
    """

    def __init__(self, agent: Agent, buffers: Buffers, block_bytes: int) -> None:
        self.num_given_up = 0
        self._agent = agent
        self._buffers = buffers
        self._block_bytes = block_bytes
        self._peers: dict[str, tuple[bytes, str]] = {}  # by engine: its metadata, and its name here
        self._under_way: list[_UnderWay] = []
        self._waiting: list[DirectJob] = []
        self._jobs: queue.SimpleQueue[DirectJob | None] = queue.SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._serve, name="kv direct", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def begin(self, job: DirectJob) -> None:
        """Begins to read; never waits."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread, without a wait for reads that are under way."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                self.look()
                continue
            if job is None:
                return
            self.take(job)

    def _pause_s(self) -> float | None:
        if not self._under_way:
            return None
        return QUARANTINE_S if all(one.is_given_up for one in self._under_way) else LOOK_S

    def take(self, job: DirectJob) -> None:
        """Begins a job, unless as many with its engine run as may."""
        self._waiting.append(job)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begins the jobs that may run now, in their order."""
        running = Counter(one.job.engine for one in self._under_way if not one.is_given_up)
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if running[job.engine] >= AT_A_TIME:
                self._waiting.append(job)
            else:
                running[job.engine] += self._begin(job)

    def _begin(self, job: DirectJob) -> bool:
        """Begins a job, and returns whether it runs: if there is no room, or its engine is not reached, its blocks do
        not come."""
        here = [at for at, (address, _) in enumerate(job.places) if address]
        if not here or len(here) > len(self._buffers.free) or job.reading.is_over:
            self._missed(job)
            return False
        buffers = {at: self._buffers.free.pop() for at in here}
        pairs = [(self._buffers.address_of(buffers[at]), job.places[at][0]) for at in here]
        try:
            peer = self._peer(job)
            transfer = self._agent.begin(peer, pairs, self._block_bytes)
        except TransferFailed as error:
            logger.warning("blocks of %s are not read: %s; their tokens will be computed again", job.engine, error)
            self._buffers.free.extend(buffers.values())  # nothing has begun
            self._forget(job.engine)
            self._missed(job)
            return False
        self._under_way.append(_UnderWay(job, peer, transfer, buffers))
        return True

    def look(self) -> None:
        """Takes what has come, gives up what is late, and frees the buffers of what has ended."""
        under_way, self._under_way = self._under_way, []
        done: list[_UnderWay] = []
        for one in under_way:
            try:
                is_done = self._agent.is_done(one.transfer)
            except TransferFailed as error:
                self._failed(one, error)
                continue
            if is_done:
                done.append(one)
                continue
            self._under_way.append(one)
            if one.job.reading.is_over:
                self._give_up(one)
        self._begin_waiting()  # before what has come is copied: nothing else may be on its way
        for one in done:
            self._came(one)

    def _came(self, one: _UnderWay) -> None:
        job = one.job
        for at, (_, checksum) in enumerate(() if one.is_given_up else job.places):
            data = self._buffers.read(one.buffers[at]) if at in one.buffers else b""
            # Its owner may have written to the slot meanwhile: that is no damage.
            is_gone = at not in one.buffers or zlib.crc32(data) != checksum
            job.reading.arrived(job.first + at, Block(0, at, checksum, is_gone=is_gone), data)
        self._end(one)
        if not one.is_given_up:
            job.on_end()

    def _failed(self, one: _UnderWay, error: TransferFailed) -> None:
        logger.warning("blocks of %s do not come: %s; their tokens will be computed again", one.job.engine, error)
        self._end(one)
        self._forget(one.job.engine)
        self._give_up(one)

    def _give_up(self, one: _UnderWay) -> None:
        if not one.is_given_up:
            one.is_given_up = True
            self.num_given_up += 1
            self._missed(one.job)

    def _end(self, one: _UnderWay) -> None:
        """Frees what a transfer had that writes nothing any more."""
        self._buffers.free.extend(one.buffers.values())
        try:
            self._agent.release(one.transfer)
        except TransferFailed as error:
            logger.debug("a transfer that has ended is not released: %s", error)

    def _peer(self, job: DirectJob) -> str:
        known, name = self._peers.get(job.engine, (b"", ""))
        if known != job.agent:
            self._forget(job.engine)
            name = self._agent.join(job.agent)
            self._peers[job.engine] = job.agent, name
        return name

    def _forget(self, engine: str) -> None:
        """Has the connection with an engine made anew, unless transfers with it may still write."""
        _, name = self._peers.get(engine, (b"", ""))
        if not name or any(one.peer == name for one in self._under_way):
            return
        del self._peers[engine]
        try:
            self._agent.leave(name)
        except TransferFailed as error:
            logger.debug("%s was not known any more: %s", engine, error)

    @staticmethod
    def _missed(job: DirectJob) -> None:
        for at in range(len(job.places)):
            job.reading.arrived(job.first + at, Block(0, at, 0, is_gone=True), b"")
        job.on_end()
