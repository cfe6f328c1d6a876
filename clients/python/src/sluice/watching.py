"""Reads the load that each of several addresses reports, for the balance between them: a thread for each address."""

import threading

import grpc

from sluice import errors
from sluice.balance import INTERVAL_S, MAX_REST_S, is_refused
from sluice.pool import Pool
from sluice.stream import Line, Metadata
from sluice.v1 import control_pb2

END_TIMEOUT_S = 5.0


class LoadWatch:
    """Follows WatchLoad of every address of a pool until it is closed."""

    def __init__(self, pool: Pool[Line], metadata: Metadata) -> None:
        self._pool = pool
        self._metadata = metadata
        self._calls: dict[int, grpc.Call] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(address,), name="sluice-load", daemon=True)
            for address in range(pool.num_targets)
        ]
        for one in self._threads:
            one.start()

    def close(self) -> None:
        """Cancels the calls and waits for the threads: one still inside grpc when the interpreter ends may keep the
        process from ending."""
        with self._lock:
            self._closed.set()
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        for one in self._threads:
            if one is not threading.current_thread():
                one.join(END_TIMEOUT_S)

    def _follow(self, address: int) -> None:
        rest_s = INTERVAL_S
        while not self._closed.wait(0.0):
            try:
                for answer in self._asked(address):
                    self._pool.reported(address, answer.load)
                    rest_s = INTERVAL_S
            except grpc.RpcError as error:
                failed = errors.from_rpc(error)
                if self._closed.is_set() or is_refused(failed):
                    return
                self._pool.failed(address, failed)
            self._closed.wait(rest_s)
            rest_s = min(2 * rest_s, MAX_REST_S)

    def _asked(self, address: int) -> "grpc._CallIterator[control_pb2.WatchLoadResponse]":
        request = control_pb2.WatchLoadRequest()
        request.interval.FromNanoseconds(int(INTERVAL_S * 1e9))
        call = self._pool.line_of(address).control.WatchLoad(request, metadata=self._metadata)
        with self._lock:
            self._calls[address] = call
            if self._closed.is_set():
                call.cancel()
        return call
