"""Generations without a reader: taken over by another reader, or released in time."""

from collections.abc import Callable
from typing import Any

import pytest
from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from tests.services.gateway.fake_ring import SETTINGS, manager_of, spec

DETACH = types_pb2.SchedulingOptions(
    on_disconnect=types_pb2.DISCONNECT_ACTION_DETACH,
    detach_ttl={"seconds": 60},  # type: ignore[arg-type] # a message
)


class WoundTimer:
    """A timer that the test advances."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class NotingReader:
    """A reader that notes why it lost its generation."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def lose(self, error: ServiceError) -> None:
        self.lost.append(error.reason)


class SessionBench:
    """Detached sessions whose timers the test advances."""

    def __init__(self, max_detached: int = 4) -> None:
        self.timers: list[tuple[float, WoundTimer]] = []
        quotas = Quotas(lambda tenant: TenantLimits(), 1)
        self.manager = manager_of(SETTINGS, lambda message: None, quotas)
        self.manager.refusal = None
        self.sessions = DetachedSessions(self.manager, self._call_later, max_detached)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> WoundTimer:
        timer = WoundTimer(callback)
        self.timers.append((delay_s, timer))
        return timer

    def left(self, **fields: Any) -> OpenRequest:  # noqa: ANN401 # of a spec
        """A request whose reader has left."""
        asked = translate.generation(spec(**fields), 0, SETTINGS)
        request, reader = self.manager.open(CallMetadata("StreamGenerate"), asked, streams=True), NotingReader()
        self.sessions.attach(request, reader)
        self.sessions.detach(request, reader, None)
        return request


def test_what_does_not_outlive_its_reader_ends_with_it() -> None:
    bench = SessionBench()
    assert bench.left().state is not RequestStatus.RUNNING
    assert not len(bench.manager.requests) and not len(bench.sessions)


def test_what_outlives_its_reader_waits_for_one_until_its_time_is_over() -> None:
    bench = SessionBench()
    request = bench.left(scheduling=DETACH)
    ((delay_s, timer),) = bench.timers
    assert (request.state, delay_s, len(bench.sessions)) == (RequestStatus.RUNNING, 60.0, 1)
    timer.callback()
    assert request.state is RequestStatus.FAILED and not len(bench.sessions) and not len(bench.manager.requests)


def test_one_reader_takes_over_from_another_who_then_leaves_nothing() -> None:
    bench, first, second = SessionBench(), NotingReader(), NotingReader()
    request = bench.left(scheduling=DETACH)
    name, tenant = request.envelope.request_id, request.envelope.tenant
    assert bench.sessions.take(name, tenant) is request and bench.timers[0][1].is_cancelled
    bench.sessions.attach(request, first)
    bench.sessions.take(name, tenant)
    bench.sessions.attach(request, second)
    bench.sessions.detach(request, first, None)
    assert first.lost == ["RESUMED_ELSEWHERE"] and not second.lost
    assert request.state is RequestStatus.RUNNING and len(bench.timers) == 1
    with pytest.raises(ServiceError, match="is not known here"):
        bench.sessions.take(name, "another")


def test_the_one_that_waits_longest_goes_when_too_many_do() -> None:
    bench = SessionBench(max_detached=1)
    first, second = bench.left(scheduling=DETACH), bench.left(scheduling=DETACH)
    assert (first.state, second.state) == (RequestStatus.FAILED, RequestStatus.RUNNING)
