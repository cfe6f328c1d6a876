"""The sockets of one rank: an inbox that it binds, and an outbox for each rank that it speaks to.

Frames begin with the number of the group's start, so that what is left of an earlier start is not heard. Hidden states
from the stage before are read apart from orders and reports. A connection that was made and is lost ends the group:
nothing is mended. A rank that is reached and says nothing is awaited like one that does not run yet: it may hang, and
be started again by its host.
"""

import contextlib
import fcntl
import os
import socket as sockets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from sluice_server.engine.errors import RankLost
from sluice_server.services.config import bad_setting
from sluice_server.services.process import private
from sluice_server.services.ranks.here import TCP, host_of
from sluice_server.services.ring.keys import RingKeys, load_keys

EPOCH_BYTES = 8
MAX_BYTES = 64 << 20  # of one frame: a step of very many tokens
IPC = "ipc://"
LOCK_SUFFIX = ".lock"  # behind the path of an inbox
HIGH_WATER_MARK = 1000  # frames that may wait for a rank; it is asked how each launch ended
PROBE_S = 1.0  # between two probes of a TCP connection
SILENCE_S = 4.0  # without an answer to a probe; a cut link is to be noticed within seven
NAME_S = 30.0  # until the name of this host has an address: orchestrators tell names late
LAST_WORD_S = 0.2  # in which a rank's reason may come behind the end of its connection
REFUSAL_S = 2.0  # in which a rank that runs refuses a key; what ends later, before it began, is no refusal
STATES = b"\xff"  # first byte of hidden states; no order or report begins so
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class Frame(NamedTuple):
    """What came from another rank."""

    epoch: int
    data: bytes


class RankSockets:
    """The sockets of one rank. `addresses` is the table {id: address of its inbox} of all ranks, rank 0 first."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        own: str,
        others: Sequence[str],
        keys: RingKeys | None = None,
        behind: str = "",
    ) -> None:
        """`own` is the id of this rank, `others` are those of the ranks that it sends orders or reports to, `behind`
        that of the next stage, to which it sends hidden states. Raises zmq.ZMQError, and ServiceError if another
        process has this inbox, or its address has no host."""
        self.epoch = 0
        self._others = tuple(others)
        self._frames: deque[Frame] = deque()  # that came while hidden states were awaited, or the other way round
        self._states: deque[bytes] = deque()
        self._loss = ""  # of a connection, once it has ended
        self._reached_s: dict[str, float] = {}  # when the host of a rank took a connection
        self._made: set[str] = set()  # ranks whose connections were made, with keys and all
        self._lock = _claim(addresses[own])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard: ThreadAuthenticator | None = keys.guard(self._context) if keys is not None else None
        self._inbox = self._context.socket(zmq.PULL)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        try:
            self._open_inbox(addresses[own], keys)
            for other in dict.fromkeys((*others, *filter(None, (behind,)))):
                self._open_outbox(other, addresses[other], keys)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes) -> None:
        """Sends an order or report to the others. Raises RankLost if one takes nothing any more."""
        frame = self.epoch.to_bytes(EPOCH_BYTES) + data
        for name in self._others:
            self._send(name, frame)

    def send_states(self, name: str, data: bytes) -> None:
        """Sends hidden states to one rank. Raises RankLost if it takes nothing any more."""
        self._send(name, b"".join((self.epoch.to_bytes(EPOCH_BYTES), STATES, data)))

    def receive(self, timeout_s: float) -> Frame | None:
        """Returns the next order or report; None after `timeout_s`, or earlier. Raises RankLost if a rank's connection
        was lost."""
        return self._frames.popleft() if self._frames or self._read(timeout_s, self._frames) else None

    def receive_states(self, timeout_s: float) -> bytes | None:
        """Returns the next hidden states, as `receive` does."""
        return self._states.popleft() if self._states or self._read(timeout_s, self._states) else None

    def close(self) -> None:
        """Closes all sockets; what was sent last may still leave."""
        for name, outbox in self._outboxes.items():
            self._monitors[name].close(0)
            outbox.close(200)
        self._inbox.close(0)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _send(self, name: str, frame: bytes) -> None:
        try:
            self._outboxes[name].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise RankLost(f"{name} takes no messages any more: {HIGH_WATER_MARK} wait for it") from None

    def _read(self, timeout_s: float, wanted: "deque[Frame] | deque[bytes]") -> bool:
        """Reads a frame; returns whether it is one of those that are wanted."""
        try:
            self._sort(self._inbox.recv(zmq.NOBLOCK))
            return bool(wanted)
        except zmq.Again:
            if self._loss:
                raise RankLost(self._loss) from None
        until_s = time.monotonic() + timeout_s
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._inbox in ready:
            self._sort(self._inbox.recv())
            return bool(wanted)
        for name, monitor in self._monitors.items():
            if monitor in ready:
                self._loss = self._loss_in(name, recv_monitor_message(monitor)["event"])
                if not self._loss:
                    return self._read(time_left(until_s), wanted)
                if not self._inbox.poll(int(LAST_WORD_S * 1000)):
                    raise RankLost(self._loss)
                return self._read(0, wanted)
        return False

    def _loss_in(self, name: str, event: int) -> str:
        """Takes what happened to the connection with a rank; returns why the group ends by it, or ""."""
        match event:
            case zmq.EVENT_CONNECTED:
                self._reached_s[name] = time.monotonic()
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._made.add(name)
            case zmq.EVENT_DISCONNECTED if name in self._made:
                return f"{name} has ended, or its connection is lost"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if time.monotonic() - self._reached_s[name] > REFUSAL_S:
                pass  # it hangs, or has ended before it said anything
            case _ if event in _FAILED:
                both = "both must have the same --ring-keys, which `sluice keys` makes"
                return f"{name} does not take this rank's key: {both}"
        return ""

    def _sort(self, data: bytes) -> None:
        """Puts a frame where it is awaited."""
        frame = Frame(int.from_bytes(data[:EPOCH_BYTES]), data[EPOCH_BYTES:])
        if not frame.data.startswith(STATES):
            self._frames.append(frame)
        elif frame.epoch == self.epoch:
            self._states.append(frame.data.removeprefix(STATES))

    def _open_inbox(self, address: str, keys: RingKeys | None) -> None:
        self._inbox.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        if keys is not None:
            keys.secure_inbox(self._inbox)
        bound = own_address(address)
        if "[" in bound:
            self._inbox.setsockopt(zmq.IPV6, 1)
        self._inbox.bind(bound)
        self._poller.register(self._inbox, zmq.POLLIN)

    def _open_outbox(self, name: str, address: str, keys: RingKeys | None) -> None:
        outbox = self._context.socket(zmq.PUSH)
        self._outboxes[name] = outbox
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        for one in _FAILED:
            events |= one
        self._monitors[name] = outbox.get_monitor_socket(events)
        self._poller.register(self._monitors[name], zmq.POLLIN)
        outbox.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        outbox.setsockopt(zmq.RECONNECT_IVL, 20)
        if keys is not None:
            keys.secure_outbox(outbox, name)
            outbox.setsockopt(zmq.HEARTBEAT_IVL, int(PROBE_S * 1000))
            outbox.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
        if "[" in address:
            outbox.setsockopt(zmq.IPV6, 1)
        outbox.connect(address)


def open_sockets(
    addresses: Mapping[str, str], own: str, others: Sequence[str], ring_keys: str = "", behind: str = ""
) -> RankSockets:
    """Opens the sockets of rank `own`, as `RankSockets` says. Raises ServiceError naming the setting at fault."""
    plain = [address for address in addresses.values() if address.startswith("tcp://")]
    if plain and not ring_keys:
        raise bad_setting("ring_keys", f"is needed for {plain[0]}: TCP is always encrypted; `sluice keys` makes them")
    keys = load_keys(ring_keys, own) if plain else None
    try:
        return RankSockets(addresses, own, others, keys, behind)
    except zmq.ZMQError as error:
        raise bad_setting("rank_peers", f"cannot listen on {addresses[own]}: {error.strerror}") from error


def own_address(address: str) -> str:
    """Returns where a rank listens: an address with the number of its host, as nothing may be bound to a name. Raises
    ServiceError for a name that has none."""
    if not address.startswith(TCP):
        return address
    number = number_of(host_of(address))
    return (
        f"{TCP}[{number}]:{address.rpartition(':')[2]}"
        if ":" in number
        else f"{TCP}{number}:{address.rpartition(':')[2]}"
    )


def number_of(host: str) -> str:
    """Returns the address of a host. Raises ServiceError if its name has none."""
    until_s = time.monotonic() + NAME_S
    while True:
        with contextlib.suppress(OSError):
            found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
            return str(found[0][4][0])
        if not time_left(until_s):
            break
        time.sleep(min(1.0, time_left(until_s)))
    raise bad_setting("rank_peers", f"{host} has no address here: give one of this host's, or a name that has one")


def _claim(address: str) -> int:
    """Returns the locked file beside an inbox that is a path; -1 for others. ZeroMQ would take the path over from a
    process that listens there."""
    if not address.startswith(IPC):
        return -1
    path = address.removeprefix(IPC)
    try:
        lock = private.open_file(Path(path + LOCK_SUFFIX), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise bad_setting("rank_peers", f"cannot listen on {address}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        text = f"another rank is at {path}: stop its group, or give this one other paths"
        raise bad_setting("rank_peers", text) from None
    return lock


def time_left(until_s: float) -> float:
    """Returns the seconds until a time of the monotonic clock; 0 when it has passed."""
    return max(0.0, until_s - time.monotonic())
