"""One cell in simulated time: a ring of engines, its admission, and the router with what engines report of their
caches."""

import dataclasses
import itertools
from collections.abc import Sequence

from sluice.v1 import control_pb2

from benchmarks.fleet.engine import EngineKind, SimulatedEngine
from sluice_server.services.gateway.access.admission import RequestLimiter
from sluice_server.services.gateway.requests.engines import Engines
from sluice_server.services.routing.router import Router

REPORT_S = 0.25  # between two reports of an engine


@dataclasses.dataclass(frozen=True, slots=True)
class CellKind:
    """What cells are made of.

    Attributes:
        num_prefill: engines that compute prompts alone, for the others; 0: every engine does both.
        link_bytes_per_s: between two engines, for what is handed on.
        routing: of the service: kv-cost, least-loaded or round-robin.
        max_open_requests: of the cell's gateways together.
    """

    engine: EngineKind
    num_engines: int = 16
    num_prefill: int = 0
    link_bytes_per_s: float = 50e9
    routing: str = "kv-cost"
    max_open_requests: int = 8192


class Cell:
    """A ring. `take` and `choose` are what its gateway and tokenizer do with a request."""

    def __init__(self, kind: CellKind, block_size: int, seed: int) -> None:
        assert not kind.num_prefill or kind.routing == "kv-cost", "prompts are handed on by the router of prompts alone"
        self.kind = kind
        self.block_size = block_size
        names = [f"engine-{number:02}" for number in range(kind.num_engines)]
        self.engines = {
            name: SimulatedEngine(name, kind.engine, block_size, seed * 1000 + number)
            for number, name in enumerate(names)
        }
        self.prefill, self.decode = names[: kind.num_prefill], names[kind.num_prefill :]
        self.limiter = RequestLimiter(kind.max_open_requests, 1 << 40)
        self.is_lost = False
        self._router = Router(names, block_size, 1 / kind.engine.cost.token_s)
        self._by_load = Engines(tuple(self.decode), "least-loaded" if kind.routing == "kv-cost" else kind.routing)
        for name in self.decode:
            self._by_load.admit(name)
        self._numbers = {name: itertools.count(1) for name in names}
        for name in names:
            self._router.index.report(name, 1, 0, (), (), is_whole=True)

    def choose(self, names: Sequence[bytes], num_tokens: int, request_id: str, now: float) -> str:
        """Returns the engine for a prompt."""
        able = self.prefill or self.decode
        if self.kind.routing == "kv-cost":
            return self._router.choose(dict.fromkeys(able, names), num_tokens, now).engine
        return self._by_load.take(request_id).engine

    def hand_on(self, request_id: str) -> str:
        """Returns the engine that goes on with a request whose prompt another one has computed."""
        return self._by_load.take(request_id).engine

    def ended(self, engine: str) -> None:
        """Counts a request of an engine as ended."""
        if self.kind.routing != "kv-cost" or (self.prefill and engine in self.decode):
            self._by_load.give_back(engine)

    def report(self, engine: str, now: float) -> None:
        """Takes what an engine reports of its cache and its speed."""
        one = self.engines[engine]
        token_s = one.scheduler.pace.token_s
        if token_s > 0:
            self._router.queues[engine].measured(1 / token_s, now)
        diff = one.log.take()
        if diff is not None:
            added = [block.name for block in diff.added]
            taken = self._router.index.report(
                engine, 1, next(self._numbers[engine]), diff.removed, added, is_whole=diff.is_whole
            )
            assert taken, "reports are neither lost nor out of order"

    def load(self) -> control_pb2.Load:
        """Returns what the cell's gateway tells clients of its load."""
        engines = [
            control_pb2.EngineLoad(
                engine_id=name,
                running_requests=one.scheduler.num_running,
                waiting_requests=one.scheduler.num_waiting,
            )
            for name, one in self.engines.items()
        ]
        return control_pb2.Load(open_requests=self.limiter.num_requests, engines=engines)
