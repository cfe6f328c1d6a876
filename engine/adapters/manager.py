"""The adapters of one engine: joins the books of the scheduler (`RequestAdapters`) with what is in memory.

The engine calls `settle` before each step and `carry_out` behind each plan; the service loads and drops adapters.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

from sluice_server.engine.adapters.entry import Copy, OrderKind
from sluice_server.engine.adapters.loader import AdapterLoader, LoadedAdapter
from sluice_server.engine.adapters.pace import share_beside
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import AdapterRef
from sluice_server.engine.scheduler.adapters import RequestAdapters

AWAIT_S = 0.005  # of a step with nothing to compute, until a read ends


class AdapterResidency(NamedTuple):
    """Where an adapter is: in a slot, in host memory, or only in its folder."""

    digest: bytes
    in_slot: bool
    in_host: bool
    is_pinned: bool


class AdapterManager:
    """Loads, keeps and drops adapters."""

    def __init__(self, requests: RequestAdapters, loader: AdapterLoader) -> None:
        self.requests = requests
        self.loader = loader
        self.num_loads = 0  # into slots, since start
        self.num_evictions = 0  # from slots
        self.num_lost = 0  # whose files were gone or had changed

    @property
    def is_awaited(self) -> bool:
        """Whether reads or loads are under way."""
        return self.loader.is_busy

    def read(self, path: str) -> "Future[LoadedAdapter]":
        """Begins to read the folder at `path` below the folder of adapters."""
        return self.loader.read(path)

    def add(self, loaded: LoadedAdapter, *, is_pinned: bool) -> None:
        """Makes an adapter that was read known, and keeps it in host memory if there is room. Raises ServiceError if
        there is never room for it, or none to pin it."""
        digest, shelf = loaded.digest, self.requests.shelf
        was_known = shelf.has(digest)
        self.requests.add(AdapterRef(digest, loaded.path, loaded.num_bytes))
        self.requests.keep(digest)
        self.loader.know(digest, loaded.path)
        if not is_pinned:
            shelf.unpin(digest)
        else:
            self._pin(digest, was_known=was_known)
        if shelf.arrive(digest):
            self.loader.keep(loaded)
        self._order()

    def drop(self, digest: bytes) -> None:
        """Drops an adapter as soon as no open request names it."""
        if self.requests.shelf.has(digest):
            self.requests.shelf.unpin(digest)
        self.requests.drop(digest)
        self._order()

    def expect(self, adapter: AdapterRef) -> None:
        """Says where the adapter of a request is read from."""
        self.loader.know(adapter.digest, adapter.path)

    def settle(self) -> bool:
        """Records what has ended since the last call; returns whether sequences may have waited for it. Called before
        each step: loads have the share of a core from now on that these leave them."""
        requests, loader = self.requests, self.loader
        loader.pace.share = share_beside(requests.num_running, requests.num_waiting, loader.least)
        ended = self.loader.ended()
        for order, is_good in ended:
            self.requests.shelf.ended(order, is_good)
            self.num_loads += is_good and order.kind is OrderKind.LOAD
            self.num_lost += not is_good
        return bool(ended)

    def carry_out(self) -> None:
        """Carries out what the plan ordered."""
        orders = self.requests.shelf.take_orders()
        if orders:
            self.num_evictions += sum(one.kind is OrderKind.FREE for one in orders)
            self.loader.carry_out(orders)

    def idle(self) -> bool:
        """Carries on with loads while there are no requests; returns whether some have ended, or copies are
        under way that end by themselves."""
        has_ended = self.settle()
        self.loader.pace.share = 1.0
        self._order()
        return has_ended or self.loader.slots.is_busy

    def wait(self) -> None:
        """Waits a moment for a read to end, as there is nothing to compute."""
        self.loader.pace.share = 1.0
        self.loader.wait(AWAIT_S)

    def residencies(self) -> Iterator[AdapterResidency]:
        """Yields where each adapter is."""
        for digest, entry in list(self.requests.shelf.entries().items()):
            in_slot, in_host = entry.device is Copy.HERE, entry.host is Copy.HERE
            yield AdapterResidency(digest, in_slot, in_host, entry.is_pinned)

    def close(self) -> None:
        """Ends the thread that reads."""
        self.loader.close()

    def _pin(self, digest: bytes, *, was_known: bool) -> None:
        try:
            self.requests.shelf.pin(digest)
        except ValueError as error:
            if not was_known:
                self.requests.drop(digest)
            option = self.requests.shelf.bounded_by
            text = f"pinned: {error}: pin fewer, or start the server with a larger {option}"
            raise ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_CAPACITY", text, field="pinned") from None

    def _order(self) -> None:
        """Has pinned adapters loaded although no request waits for them."""
        if self.requests.shelf.has_pins:
            self.requests.shelf.look_over({})
        self.carry_out()
