"""Tells gateways and tokenizers how loaded an engine is, how it computes, and what adapters it has."""

from collections.abc import Callable

from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.computing import Computing
from sluice_server.services.engine.adapter_calls import AdapterCalls
from sluice_server.services.engine.answers import load_of
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import Report

INTERVAL_S = 0.25  # between two reports


class LoadReports:
    """The reports of one engine's load.

    Attributes:
        computing: how the engine computes.
        fetch_s: returns the seconds that one cached token takes to fetch; see `Report`.
        memory_level: returns how short memory is.
        has_served: whether the engine has sampled a token.
    """

    def __init__(
        self,
        engine: Engine,
        place: RingMembership,
        emit: Callable[[Message], None],
        computing: Computing,
        adapters: AdapterCalls,
        cache_identity: bytes,
    ) -> None:
        self.computing = computing
        self.fetch_s: Callable[[], float] = lambda: 0.0
        self.memory_level: Callable[[], int] = lambda: 0
        self.has_served = False
        self._engine = engine
        self._place = place
        self._emit = emit
        self._adapters = adapters
        self._cache_identity = cache_identity
        self._reported_at = 0.0

    def report(self) -> None:
        """Sends a report every `INTERVAL_S`."""
        now = self._place.clock()
        if now - self._reported_at < INTERVAL_S:
            return
        self._reported_at = now
        load, place, adapters = load_of(self._engine), self._place, self._adapters.changed()
        about = self.computing, self._cache_identity, self.memory_level(), adapters, self._adapters.num_changes
        told = *about, place.role, self.fetch_s()
        self._emit(Report(place.id, place.epoch, load, self.has_served, *told))
