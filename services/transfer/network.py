"""Passes cache blocks between the engines of several hosts: ZeroMQ with CURVE and the keys of the ring.

Each engine listens beside its inbox, at a port of its own. A thread has all sockets: it gives this engine's offered
blocks to others, and asks them for theirs. The engine waits until its deadline and no longer; one that lets a question
pass is not asked for a while. Bytes have a checksum of their own, and what does not come is computed. With NIXL on both
sides the reader reads the owner's memory itself: then only questions and answers go this way.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial

import msgspec
import zmq

from sluice_server.engine.kv_cache.shared_slots import ReadSlots, SharedSlots
from sluice_server.services.ring.keys import RingKeys
from sluice_server.services.transfer.direct_reads import AT_A_TIME, DirectJob, DirectReads
from sluice_server.services.transfer.names import MAX_NAMES, joined
from sluice_server.services.transfer.network_frames import (
    ANSWERS,
    MAX_REQUEST_BYTES,
    Block,
    Find,
    Get,
    Offered,
    Placed,
    Release,
    Request,
    Where,
    digest_of,
)
from sluice_server.services.transfer.network_peers import CURVE_BYTES, NetworkPeer, connected, watch
from sluice_server.services.transfer.owner import BlockOwner
from sluice_server.services.transfer.reading import Question, Reading

logger = logging.getLogger(__name__)

FIND_S = 0.05  # the most seconds until engines must have said what they offer


class NetworkCarrier:
    """The blocks of this engine for engines of other hosts, and theirs for it; see `engine.transfer.BlockSource`."""

    def __init__(  # what a connection is made of
        self,
        own: str,
        others: Mapping[str, str],
        slots: SharedSlots,
        layout: bytes,
        block_bytes: int,
        keys: RingKeys,
    ) -> None:
        """`own`: where to listen; `others`: where the other engines do, by id. Raises OSError if it cannot listen."""
        self.num_damaged = 0  # blocks whose bytes were not what was sent
        self._usual_s = 0.0  # until all engines have answered a question; what is computed sooner is not asked for
        self._layout = digest_of(layout, block_bytes)
        self._block_bytes = block_bytes
        self._keys = keys
        self._owner = BlockOwner(ReadSlots(slots.file, block_bytes, layout), self._layout)
        self._wanted = dict(others)
        self._peers: dict[str, NetworkPeer] = {}
        self._number = self._num_gets = 0
        self._questions: dict[int, Question] = {}
        self._gets: dict[int, tuple[Reading, int]] = {}  # by number: whose, and the place of its first block
        self._readings: dict[bytes, Reading] = {}  # of the blocks that the engine waits for
        self._engine_of: dict[bytes, str] = {}  # of what was found last
        self._todo: deque[Callable[[], object]] = deque()
        self._direct: DirectReads | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = keys.guard(self._context)
        self._listener = self._context.socket(zmq.ROUTER)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        try:
            self._listen(own)
        except zmq.ZMQError as error:
            self._end()
            raise OSError(error.errno, f"cannot listen on {own} ({error.strerror})") from error
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="kv network", daemon=True)
        self._thread.start()

    @property
    def region(self) -> tuple[int, int]:
        """Address and size of the memory of the blocks that this engine offers."""
        return self._owner.region

    def read_directly(self, direct: DirectReads, agent: bytes) -> None:
        """Reads the memory of engines that allow it, from now on, and lets others read this one's by `agent`."""
        self._direct, self._owner.agent = direct, agent
        direct.start()

    def change(self, others: Mapping[str, str]) -> None:
        """Reads the blocks of these engines from now on: some have joined, and some have left."""
        self._wanted = dict(others)
        self._do(lambda: None)

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """Implements `BlockSource.find`."""
        now_s = time.monotonic()
        self._readings, self._engine_of = {}, {}
        asked = [one for one in tuple(self._peers.values()) if one.rests_until_s <= now_s]
        names = names[:MAX_NAMES]
        if not asked or not names or end_s - now_s < self._usual_s:
            return {}
        self._number += 1
        question = self._questions[self._number] = Question(self._number, names, len(asked))
        self._do(partial(self._ask, question, asked))
        question.wait(min(end_s, now_s + FIND_S))
        del self._questions[self._number]

        self._note_silent(asked, question, is_late=end_s >= now_s + FIND_S)
        if len(question.by_engine) == len(asked):
            self._usual_s = 0.8 * self._usual_s + 0.2 * (time.monotonic() - now_s)
        for engine, offered in question.by_engine.items():
            self._engine_of |= dict.fromkeys(offered - self._engine_of.keys(), engine)
        return {name: partial(self._read, name) for name in names if name in self._engine_of}

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Implements `BlockSource.begin`: has blocks sent, a few at a time."""
        by_engine: dict[str, list[bytes]] = {}
        for name in names:
            if name in self._engine_of:
                by_engine.setdefault(self._engine_of[name], []).append(name)
        for engine, own in by_engine.items():
            reading = Reading(own, self._block_bytes, end_s)
            self._readings |= dict.fromkeys(own, reading)
            self._do(partial(self._continue, engine, reading))

    def release(self, names: Sequence[bytes]) -> None:
        """Implements `BlockSource.release`. Never waits: what does not arrive ends with its lease."""
        readings = set(self._readings.values())
        self.num_damaged += sum(one.num_damaged for one in readings)
        self._readings = {}
        self._do(partial(self._drop, readings))
        for engine in set(self._engine_of.values()):
            own = [name for name in names if self._engine_of.get(name) == engine]
            if own:
                self._do(partial(self._send, engine, Release(joined(own))))

    def clear(self, owner: bytes) -> bool:
        """Implements `BlockSource.clear`: other engines clear their own."""
        return True

    def take_released(self) -> list[bytes]:
        """Implements `BlockSource.take_released`."""
        taken = []
        while self._owner.released:
            taken.append(self._owner.released.popleft())
        return taken

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._is_over = True
        if self._direct is not None:
            self._direct.close()
        self._do(lambda: None)
        self._thread.join()
        self._end()

    def _read(self, name: bytes) -> bytes | None:
        reading = self._readings.get(name)
        return None if reading is None else reading.take(name)

    def _note_silent(self, asked: Iterable[NetworkPeer], question: Question, *, is_late: bool) -> None:
        """Lets engines rest that had time enough and did not answer."""
        for peer in asked:
            if peer.name in question.by_engine:
                peer.answered()
            elif is_late:
                peer.passed(time.monotonic())

    def _do(self, work: Callable[[], object]) -> None:
        """Has the thread do something."""
        self._todo.append(work)
        os.eventfd_write(self._wake, 1)

    # What follows runs on the thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._is_over:
            self._reconcile(poller)
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._todo:
                self._todo.popleft()()
            if self._listener in ready:
                self._give()
            for peer in tuple(self._peers.values()):
                if peer.socket in ready:
                    self._hear(peer)

    def _reconcile(self, poller: zmq.Poller) -> None:
        """Connects to engines that joined, and leaves those that left or have another address."""
        wanted = self._wanted
        for name in [one for one, peer in self._peers.items() if wanted.get(one) != peer.address]:
            left = self._peers.pop(name)
            poller.unregister(left.socket)
            left.socket.close(0)
        for name in wanted.keys() - self._peers.keys():
            peer = connected(self._context, name, wanted[name], self._keys, self._block_bytes)
            poller.register(peer.socket, zmq.POLLIN)
            self._peers[name] = peer

    def _listen(self, own: str) -> None:
        self._keys.secure_inbox(self._listener)
        self._listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES + CURVE_BYTES)
        self._listener.setsockopt(zmq.SNDHWM, 0)  # a reader asks for a few at a time
        watch(self._listener, own)
        self._listener.bind(own)

    def _ask(self, question: Question, asked: Sequence[NetworkPeer]) -> None:
        """Sends a question; who is not connected has no answer."""
        find = Find(question.number, self._layout, joined(question.names))
        for peer in asked:
            if self._peers.get(peer.name) is not peer or not self._send(peer.name, find):
                question.answered(peer.name, b"")

    def _continue(self, engine: str, reading: Reading) -> None:
        """Asks for further blocks."""
        peer = self._peers.get(engine)
        is_direct = self._direct is not None and peer is not None and not peer.sends
        ask, parts = (Where, AT_A_TIME + 1) if is_direct else (Get, 1)  # one part is asked for while others are read
        while (asked := reading.next(parts)) is not None:
            first, names = asked
            self._num_gets += 1
            self._gets[self._num_gets] = reading, first
            if not self._send(engine, ask(self._num_gets, self._layout, joined(names))):
                reading.lost()

    def _send(self, engine: str, request: Request) -> bool:
        peer = self._peers.get(engine)
        return peer is not None and peer.send(request)

    def _drop(self, readings: Set[Reading]) -> None:
        """Forgets blocks that no fetch waits for any more."""
        self._gets = {number: get for number, get in self._gets.items() if get[0] not in readings}

    def _give(self) -> None:
        """Answers what other engines ask."""
        with contextlib.suppress(zmq.Again):
            while True:
                sender, *frames = self._listener.recv_multipart(zmq.NOBLOCK)
                for answer in self._owner.answers(frames[0] if len(frames) == 1 else b""):
                    self._listener.send_multipart([sender, *answer], copy=False)

    def _hear(self, peer: NetworkPeer) -> None:
        """Takes what an engine answers."""
        with contextlib.suppress(zmq.Again):
            while True:
                header, *rest = peer.socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(msgspec.MsgspecError):
                    self._take(peer, ANSWERS.decode(header), rest[0] if rest else b"")

    def _take(self, peer: NetworkPeer, answer: Offered | Block | Placed, data: bytes) -> None:
        if isinstance(answer, Offered):
            if answer.refusal and answer.refusal != peer.refusal:
                logger.warning("no cache blocks are fetched from %s: %s", peer.name, answer.refusal)
            peer.refusal = answer.refusal
            question = self._questions.get(answer.number)
            if question is not None:
                question.answered(peer.name, answer.which)
            return
        reading, first = self._gets.get(answer.number, (None, 0))
        if reading is not None and isinstance(answer, Placed):
            self._read_directly(peer, answer, reading, first)
        elif reading is not None and isinstance(answer, Block):
            reading.arrived(first + answer.at, answer, data)
            self._continue(peer.name, reading)

    def _read_directly(self, peer: NetworkPeer, answer: Placed, reading: Reading, first: int) -> None:
        """Reads blocks of an engine's memory, or has them sent if that is not allowed."""
        self._gets.pop(answer.number)
        num = min(len(answer.places), len(reading.names) - first)
        if answer.agent and self._direct is not None:
            go_on = partial(self._do, partial(self._continue, peer.name, reading))
            self._direct.begin(DirectJob(peer.name, answer.agent, reading, first, answer.places[:num], go_on))
            return
        peer.sends = True
        self._num_gets += 1
        self._gets[self._num_gets] = reading, first
        if not self._send(peer.name, Get(self._num_gets, self._layout, joined(reading.names[first : first + num]))):
            reading.lost()

    def _end(self) -> None:
        for peer in self._peers.values():
            peer.socket.close(0)
        self._listener.close(0)
        self._guard.stop()
        self._context.term()
        os.close(self._wake)
