"""Reads adapters on a thread of its own, and carries out the orders of a shelf: host memory and the slots of steps.

On a CPU slots are in host memory; a device is given copies of what is there (`DeviceSlots`). The thread computes alone
and rests between tensors (`Pace`), so that a load delays steps as little as it can. It has the priority of the others:
one of a lower priority that is interrupted while it has Python's interpreter keeps that from the thread that computes.
What is dropped is freed there too: the system takes milliseconds to take back the memory of a large adapter.
"""

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from sluice_server.engine.adapters.cutting import AdapterCut
from sluice_server.engine.adapters.entry import Order, OrderKind
from sluice_server.engine.adapters.files import LowRank, most_bytes, read_adapter
from sluice_server.engine.adapters.modules import Module
from sluice_server.engine.adapters.pace import ROOMY, Pace
from sluice_server.engine.adapters.sources import AdapterFolder, AdapterSources
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.slots.adapters import AdapterSlots

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
OnSlot: TypeAlias = Callable[[int, str, bytes], None]  # slot, path, "" for one that is emptied, and digest
NUM_FETCHES = 4  # downloads at once
ARRIVE_S = 0.0005  # of a wait for a copy to a device, which nothing ends


class AdapterContent(Protocol):
    """An adapter in host memory, in the form in which slots take it."""

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in a slot."""


class Slots(AdapterSlots, Protocol):
    """What slots hold, and what fills them."""

    @property
    def is_busy(self) -> bool:
        """Whether slots are being filled."""

    def fill(self, slot: int, content: Any, then: Callable[[], None]) -> None:  # noqa: ANN401 # each takes its own
        """Begins to fill a slot with what `AdapterBase.make` made; `then` is called here or by `settle`."""

    def empty(self, slot: int) -> object:
        """Empties a slot; returns what it held."""

    def settle(self) -> None:
        """Notes which slots are full now."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that was read: ready to be computed with.

    Attributes:
        path: that names the same files again.
        rank: the greatest of its modules.
        modules: names of the projections that it changes.
        content: what it adds to each layer.
        seconds: how long it took to read and fold.
    """

    digest: bytes
    path: str
    rank: int
    modules: tuple[str, ...]
    content: AdapterContent
    seconds: float

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in memory."""
        return self.content.num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterBase:
    """What adapters belong to.

    Attributes:
        modules: of a model, by name.
        make: makes what slots take, of an adapter's parts, the partial products that a rank computes of a linear whose
            inputs are shared out, and what is called between tensors.
        cut: what cuts adapters for a rank; None for the whole model.
    """

    modules: Mapping[str, Module]
    make: Callable[[Mapping[str, LowRank], int, Callable[[], None]], AdapterContent]
    cut: AdapterCut | None = None


def _outcome(call: Callable[[], _T]) -> Callable[[], _T]:
    """Calls a function; returns what returns its result, or raises its error."""
    done: Future[_T] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done.result


def _nothing() -> None:
    """The default of `on_ended`."""


def _untold(slot: int, path: str, digest: bytes) -> None:
    """The default of `on_slot`."""


def _begin() -> None:
    """Begins the thread. Helpers of torch would wait for each other by spinning."""
    torch.get_num_threads()  # a thread's first call gives it the number of all threads
    torch.set_num_threads(1)


class AdapterLoader:
    """The adapters in memory.

    Attributes:
        pace: of the thread.
        least: the share of a core that is left to it beside sequences that run.
    """

    def __init__(self, sources: AdapterSources, base: AdapterBase, slots: Slots, least: float = ROOMY) -> None:
        self.sources = sources
        self.on_ended: Callable[[], None] = _nothing  # called on the thread when a read has ended
        self.on_slot: OnSlot = _untold
        self.slots = slots
        self.pace, self.least = Pace(), least
        self.num_reads = 0  # since start
        self.read_s = 0.0  # seconds of these
        self._base = base
        self._host: dict[bytes, LoadedAdapter] = {}
        self._paths: dict[bytes, str] = {}
        self._ended: deque[tuple[Order, bool]] = deque()
        self._num_under_way = 0
        self._has_ended = threading.Event()
        num_threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "adapters", initializer=_begin)
        self._executor.submit(_nothing).result()
        self._fetching = ThreadPoolExecutor(
            NUM_FETCHES, "adapters-fetch"
        )  # threads begin with the first that is fetched
        torch.set_num_threads(num_threads)  # for threads that begin later: this one's number has become theirs

    @property
    def is_busy(self) -> bool:
        """Whether orders have not ended yet."""
        return self._num_under_way > 0

    def know(self, digest: bytes, path: str) -> None:
        """Says where an adapter is read from."""
        self._paths[digest] = path

    def read(self, path: str) -> "Future[LoadedAdapter]":
        """Begins to read the folder at `path`; the future raises ServiceError for one that cannot be used."""
        reading = self._begin(path, lambda folder: self._read(folder()))
        reading.add_done_callback(lambda _: self.on_ended())
        return reading

    def keep(self, adapter: LoadedAdapter) -> None:
        """Takes an adapter that was read into host memory."""
        self._host[adapter.digest] = adapter

    def let_go(self, held: list[object]) -> None:
        """Frees on the thread what a list alone holds."""
        self._executor.submit(held.clear)

    def carry_out(self, orders: Iterable[Order]) -> None:
        """Carries out orders; reads end later."""
        for order in orders:
            if order.slot >= 0:
                is_filled = order.kind is not OrderKind.FREE
                self.on_slot(order.slot, self._paths[order.digest] if is_filled else "", order.digest)
            match order.kind:
                case OrderKind.READ:
                    self._num_under_way += 1
                    self._begin(self._paths[order.digest], functools.partial(self._fill, order))
                case OrderKind.LOAD:
                    self._num_under_way += 1
                    # Where slots are in host memory, the adapter itself goes there.
                    take = self._host.__getitem__ if self.slots.on_device else self._host.pop
                    self._load(order, take(order.digest))
                case OrderKind.FORGET:
                    self.let_go([self._host.pop(order.digest)])
                case OrderKind.FREE:
                    self.let_go([self.slots.empty(order.slot)])

    def ended(self) -> list[tuple[Order, bool]]:
        """Returns the reads and loads that have ended since the last call, and whether they succeeded."""
        self._has_ended.clear()
        self.slots.settle()
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        self._num_under_way -= len(found)
        return found

    def wait(self, seconds: float) -> None:
        """Waits until a read has ended or a copy may have arrived, so many seconds at most."""
        self._has_ended.wait(min(seconds, ARRIVE_S) if self.slots.is_busy else seconds)

    def close(self) -> None:
        """Ends the thread, after the read that it is at."""
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._executor.shutdown(cancel_futures=True)

    def _begin(self, path: str, take: "Callable[[Callable[[], AdapterFolder]], _T]") -> "Future[_T]":
        """Has the thread call `take` with what gives the folder of a path, once that is fetched."""
        if self.sources.is_local(path):
            return self._executor.submit(take, lambda: self.sources.local(path))
        limits = most_bytes(self._base.modules)

        def fetched() -> "_T":
            found = _outcome(lambda: self.sources.fetched(path, limits))
            return self._executor.submit(take, found).result()

        return self._fetching.submit(fetched)

    def _read(self, found: AdapterFolder) -> LoadedAdapter:
        start = time.monotonic()
        base = self._base
        adapter = read_adapter(found.root, found.folder, base.modules, rest=self.pace.rest)
        parts, num_shards = adapter.parts, 1
        if base.cut is not None:
            parts, num_shards = base.cut.of(parts), base.cut.num_shards
        content = base.make(parts, num_shards, self.pace.rest)
        modules = tuple(dict.fromkeys(base.modules[name].projection for name in adapter.parts))
        took = time.monotonic() - start
        self.num_reads += 1
        self.read_s += took
        return LoadedAdapter(adapter.digest, found.path, adapter.rank, modules, content, took)

    def _fill(self, order: Order, folder: Callable[[], AdapterFolder]) -> None:
        """Carries out a READ, on the thread."""
        is_good = False
        try:
            found = self._read(folder())
            is_good = found.digest == order.digest
            if is_good and order.slot < 0:
                self._host[order.digest] = found
            elif is_good:
                self._load(order, found)
                return
            else:
                logger.warning("the adapter %s has changed since it was loaded", self._paths[order.digest])
        except ServiceError as error:
            logger.warning("the adapter %s cannot be read again: %s", self._paths[order.digest], error.message)
        except Exception:
            logger.exception("the adapter %s cannot be read again", self._paths[order.digest])
        self._end(order, is_good=is_good)

    def _load(self, order: Order, adapter: LoadedAdapter) -> None:
        self.slots.fill(order.slot, adapter.content, lambda: self._end(order, is_good=True))

    def _end(self, order: Order, *, is_good: bool) -> None:
        self._ended.append((order, is_good))
        self._has_ended.set()
        self.on_ended()
